/* Feeds the parsers of plugin.cc with random bytes, and with valid ones, some of them changed. */
#include "../src/plugin.cc"

#include <cstdlib>
#include <random>

#define CHECK_THAT(x)                                                                              \
	do {                                                                                           \
		if (!(x)) {                                                                                \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #x);                                \
			abort();                                                                               \
		}                                                                                          \
	} while (0)

namespace
{

std::mt19937_64 rng(1);

std::string noise(size_t limit)
{
	std::string s(rng() % (limit + 1), '\0');
	for (char &c : s)
		c = static_cast<char>(rng());
	return s;
}

std::string changed(std::string s)
{
	for (int n = static_cast<int>(rng() % 3); n > 0 && !s.empty(); n--)
		s[rng() % s.size()] = static_cast<char>(rng());
	if (rng() % 4 == 0)
		s.resize(rng() % (s.size() + 1));
	return s;
}

void notes(const std::string &s)
{
	Note n;
	if (!read_note(s.data(), s.size(), n) || n.kind == Note::kRead)
		return;
	CHECK_THAT(n.bytes >= 4 && n.bytes <= kMessageBytes);
	CHECK_THAT(uint64_t{n.offset} + n.bytes <= kInAt);
}

void connections(const std::string &s)
{
	Peer p;
	if (!read_conn_info(s, p))
		return;
	CHECK_THAT(!p.endpoint.empty() && p.endpoint.size() <= KVS_MAX_NAME_BYTES);
	CHECK_THAT(p.box.size() <= KVS_MAX_NAME_BYTES && is_name(p.box));
}

/* Places that are in use are apart, and those that were given back are found again. */
void slots()
{
	Slots s;
	std::map<uint32_t, size_t> taken;
	for (int i = 0; i < 200; i++) {
		if (rng() % 3 && !taken.empty()) {
			auto it = std::next(taken.begin(), static_cast<long>(rng() % taken.size()));
			s.free(it->first, it->second);
			taken.erase(it);
			continue;
		}
		const size_t bytes = 1 + rng() % kMessageBytes;
		const uint32_t at = s.take(bytes);
		if (at == Slots::kNone)
			continue;
		CHECK_THAT(at % kSlotBytes == 0 && at + bytes <= kInAt);
		auto next = taken.lower_bound(at);
		CHECK_THAT(next == taken.end() || at + bytes <= next->first);
		CHECK_THAT(next == taken.begin() || std::prev(next)->first + std::prev(next)->second <= at);
		taken[at] = bytes;
	}
	for (auto &[at, bytes] : taken)
		s.free(at, bytes);
	CHECK_THAT(s.take(kInAt) == 0);
}

} // namespace

int main(int, char **argv)
{
	Note good;
	good.kind = Note::kMessage;
	good.bytes = 100;
	const std::string note(reinterpret_cast<char *>(&good), sizeof good);
	const std::string name = "nixl-" + std::string(2 * kIdBytes, 'a');
	const std::string info = kConnMagic + name + " 127.0.0.1:7650";
	Peer p;
	CHECK_THAT(read_note(note.data(), note.size(), good) && read_conn_info(info, p));
	CHECK_THAT(p.endpoint == "127.0.0.1:7650" && p.box == name + kBox);
	for (long i = atol(argv[1]); i > 0; i--) {
		std::string agent, text;
		notes(noise(KVS_MAX_NOTE_BYTES));
		notes(changed(note));
		connections(noise(2 * KVS_MAX_NAME_BYTES));
		connections(changed(info));
		(void)is_name(changed(name));
		const std::string a = noise(300), t = noise(300), message = changed(write_message(a, t));
		if (read_message(message.data(), message.size(), agent, text))
			CHECK_THAT(agent.size() + text.size() + sizeof(uint32_t) == message.size());
		const std::string whole = write_message(a, t);
		CHECK_THAT(read_message(whole.data(), whole.size(), agent, text) && agent == a &&
				   text == t);
		if (i % 100 == 0)
			slots();
	}
	puts("ok");
}
