/* NIXL's back end KVSPRAY: memory of an agent becomes segments, and transfers become batches.
 * docs/nixl.md has the use and the bounds.
 *
 * Memory. Each registration is a region and a segment of its own. The segment's name is random, and
 * is the metadata that other agents get. Nothing is found by the name of an agent.
 *
 * Transfers. prepXfer makes one job for each remote segment and kEntries ranges. A job is a batch.
 * At most kOpenBatches are open, the others wait in a queue. A transfer has ended once each of its
 * jobs has: then no process accesses its memory any more.
 *
 * Notifications are longer than the note of a batch. The sender keeps a message in its box, which
 * is a segment, too. It sends a note that names the place, the length and a checksum, with a read
 * of one byte of the receiver's box. The receiver reads the message, and this read has the note
 * that frees the place.
 *
 * Threads. One takes completions and starts jobs, one takes notes and registers the segments again
 * after a reconnection. Functions of NIXL come from any thread. registry_ is taken before mu_.
 */
#include <array>
#include <bitset>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <unistd.h>

#include "nixl_abi.h"

#define _Static_assert static_assert /* of the C headers */
extern "C" {
#include "internal.h"
}

#ifndef KVS_RELEASE
#define KVS_RELEASE "unknown"
#endif

namespace
{

using namespace nixl_abi;
using Clock = std::chrono::steady_clock;

constexpr uint32_t kEntries = 16384;       /* of a batch */
constexpr size_t kOpenBatches = 16;        /* of an agent */
constexpr size_t kAgents = 4096;           /* whose metadata is loaded */
constexpr size_t kMessageBytes = 64 << 10; /* a notification and the name of its agent */
constexpr size_t kSlotBytes = 4096;        /* messages begin at multiples of it in a box */
constexpr size_t kSlots = 256;             /* of messages sent, and as many of those received */
constexpr size_t kMessages = 65536;        /* received, until getNotifs */
constexpr auto kUnread = std::chrono::seconds(60); /* after which a message may be overwritten */
constexpr auto kRoom = std::chrono::seconds(5);    /* genNotif waits for room for its message */
constexpr auto kPause = std::chrono::milliseconds(100); /* before a request is tried again */
constexpr auto kCancel = std::chrono::seconds(2);       /* a release waits for the fence */
constexpr auto kExit = std::chrono::seconds(1);         /* until the exit of a sidecar is proved */
constexpr int kAnswerMs = 10000;                        /* the sidecar's answer to a request */
constexpr int kFenceMs = 30000; /* deregistration: until nothing uses the memory */
constexpr int kWaitMs = 1000;   /* a message may be overwritten meanwhile */
constexpr uint32_t kNotesWaitMs = 60000;
constexpr size_t kAnswerBytes = 256 << 10;
constexpr size_t kIdBytes = 16;
constexpr uint32_t kMaxSegments = 256; /* of a worker, one of them the box */

constexpr uint32_t kMsgDone = 19, kMsgLocated = 25, kMsgNoted = 27;
constexpr char kConnMagic[] = "kvspray-nixl 1 ";

/* ---- what agents send to each other ---- */

/* The note of a batch. All sidecars of a cluster are little-endian. */
struct Note {
	static constexpr uint32_t kMagic = 0x314e564b; /* KVN1 */
	enum Kind : uint32_t { kMessage = 1, kRead = 2 };

	uint32_t magic = kMagic;
	uint32_t kind = 0;
	std::array<uint8_t, kIdBytes> sender{}; /* kMessage: whose box has it */
	uint64_t seq = 0;                       /* the sender's number of the message */
	uint32_t offset = 0, bytes = 0;         /* in its box */
	uint64_t sum = 0;
};
static_assert(sizeof(Note) == 48 && sizeof(Note) <= KVS_MAX_NOTE_BYTES);

/* False: no note that this back end sends. */
bool read_note(const void *data, size_t bytes, Note &out)
{
	if (bytes != sizeof out)
		return false;
	memcpy(&out, data, sizeof out);
	if (out.magic != Note::kMagic)
		return false;
	if (out.kind == Note::kRead)
		return true;
	return out.kind == Note::kMessage && out.bytes >= sizeof(uint32_t) &&
		   out.bytes <= kMessageBytes && out.offset <= kSlots * kSlotBytes - out.bytes;
}

/* FNV-1a: it finds a place that was overwritten, not an attacker. */
uint64_t checksum(const char *data, size_t bytes)
{
	uint64_t h = 0xcbf29ce484222325u;
	for (size_t i = 0; i < bytes; i++)
		h = (h ^ static_cast<uint8_t>(data[i])) * 0x100000001b3u;
	return h;
}

/* A message: length of the agent's name, the name, the notification. */
std::string write_message(const std::string &agent, const std::string &text)
{
	uint32_t n = static_cast<uint32_t>(agent.size());
	return std::string(reinterpret_cast<char *>(&n), sizeof n) + agent + text;
}

bool fits(const std::string &agent, const std::string &text)
{
	return sizeof(uint32_t) + agent.size() + text.size() <= kMessageBytes;
}

bool read_message(const char *data, size_t bytes, std::string &agent, std::string &text)
{
	uint32_t n;
	if (bytes < sizeof n)
		return false;
	memcpy(&n, data, sizeof n);
	if (n > bytes - sizeof n)
		return false;
	agent.assign(data + sizeof n, n);
	text.assign(data + sizeof n + n, bytes - sizeof n - n);
	return true;
}

constexpr char kPrefix[] = "nixl-", kBox[] = "/box", kHex[] = "0123456789abcdef";
constexpr size_t kNameBytes = sizeof kPrefix - 1 + 2 * kIdBytes;

std::string name_of(const std::array<uint8_t, kIdBytes> &id)
{
	std::string out = kPrefix;
	for (uint8_t byte : id)
		(out += kHex[byte >> 4]) += kHex[byte & 15];
	return out;
}

/* The name of an agent's engine, or of a segment of it: /NUMBER or kBox follows. */
bool is_name(const std::string &s)
{
	const size_t head = sizeof kPrefix - 1;
	return s.size() >= kNameBytes && s.size() <= KVS_MAX_NAME_BYTES &&
		   s.compare(0, head, kPrefix) == 0 && s.find_first_not_of(kHex, head) >= kNameBytes &&
		   s.find_first_not_of("0123456789/box", kNameBytes) == s.npos;
}

struct Peer {
	std::string endpoint, box;
};

/* Connection information: kConnMagic, the name of the agent's engine, a space, the endpoint of its
 * sidecar. */
bool read_conn_info(const std::string &info, Peer &out)
{
	const size_t head = sizeof kConnMagic - 1, end = head + kNameBytes;
	if (info.size() <= end + 1 || info.size() > end + 1 + KVS_MAX_NAME_BYTES ||
		info.compare(0, head, kConnMagic) != 0 || info[end] != ' ')
		return false;
	std::string name = info.substr(head, kNameBytes), endpoint = info.substr(end + 1);
	if (!is_name(name))
		return false;
	for (unsigned char c : endpoint)
		if (c <= ' ' || c > '~')
			return false;
	out = {endpoint, name + kBox};
	return true;
}

/* ---- memory ---- */

struct Memory final : Metadata {
	Memory() : Metadata(true) {}
	kvs_region region{};
	uint32_t number = 0;
	uint64_t bytes = 0;    /* of the segment, from the region's start on */
	bool writable = false; /* for other agents */
	uint64_t session = 0;  /* in which the segment is registered */
	uint64_t sessions = 0, exits = 0; /* of the client, with sidecars, when it was added */
	std::string segment;
};

struct RemoteMemory final : Metadata {
	RemoteMemory() : Metadata(false) {}
	std::string endpoint, segment;
	uintptr_t addr = 0;
};

/* Places for messages in one half of a box. */
class Slots
{
	std::bitset<kSlots> used_;

	static size_t count(size_t bytes) { return (bytes + kSlotBytes - 1) / kSlotBytes; }

  public:
	static constexpr uint32_t kNone = UINT32_MAX;

	uint32_t take(size_t bytes)
	{
		const size_t n = count(bytes);
		for (size_t at = 0, run = 0; at < kSlots; at++) {
			run = used_[at] ? 0 : run + 1;
			if (run < n)
				continue;
			for (size_t i = at + 1 - n; i <= at; i++)
				used_.set(i);
			return static_cast<uint32_t>((at + 1 - n) * kSlotBytes);
		}
		return kNone;
	}

	void free(uint32_t offset, size_t bytes)
	{
		for (size_t i = 0; i < count(bytes); i++)
			used_.reset(offset / kSlotBytes + i);
	}
};

/* A box: messages that this agent sends, which is the segment; messages that it receives; a byte
 * for each message, which the read that carries the note fills. */
constexpr uint64_t kInAt = kSlots * kSlotBytes, kByteAt = 2 * kInAt;
constexpr uint64_t kBoxBytes = kByteAt + kSlotBytes, kListBytes = kEntries * sizeof(kvs_entry);
static_assert(kSlots <= kSlotBytes && kListBytes % kSlotBytes == 0);

/* ---- transfers ---- */

struct Outcome {
	int status; /* enum kvs_status, or enum kvs_error */
	std::string reason;
};

struct Request;

/* One batch. */
struct Job {
	bool write = false;
	std::string endpoint, segment;
	std::vector<uint32_t> regions;
	std::vector<kvs_entry> entries;
	std::string note;
	uint64_t message = 0; /* the number of the message that it announces */
	Request *request = nullptr; /* nullptr: a notification without a transfer, or a read message */
	std::function<void(const Outcome &)> done; /* called with mu_ held */

	/* The place of a local region; KVS_MAX_BATCH_REGIONS: there are too many. */
	uint32_t index_of(uint32_t number)
	{
		for (size_t i = regions.size(); i-- > 0;)
			if (regions[i] == number)
				return static_cast<uint32_t>(i);
		if (regions.size() < KVS_MAX_BATCH_REGIONS)
			regions.push_back(number);
		return static_cast<uint32_t>(regions.back() == number ? regions.size() - 1
															  : KVS_MAX_BATCH_REGIONS);
	}
};
using JobP = std::shared_ptr<Job>;

struct Request final : Handle {
	std::vector<JobP> jobs;
	std::string agent, notification;
	bool notifies = false;
	size_t left = 0; /* jobs that have not ended */
	Status status = kNotPosted;
	Status result = kSuccess; /* of the jobs that have ended */
};

/* No kRemoteDisconnect: for it NIXL would forget the agent, whose metadata stay valid. */
Status status_of(int status)
{
	return status == KVS_OK ? kSuccess : status == KVS_CANCELLED ? kCanceled : kBackend;
}

class Client
{
	const std::string agent_;
	const pid_t pid_ = getpid();
	std::array<uint8_t, kIdBytes> id_{};
	std::string name_, endpoint_; /* nixl- and the id; of the sidecar */
	kvs_client *c_ = nullptr;
	kvs_region whole_{}; /* memory of this back end's own */
	std::array<pthread_t, 2> threads_{};
	size_t running_ = 0; /* of these */

	std::mutex registry_; /* guards what follows */
	std::set<Memory *> memories_;
	Memory box_;
	uint64_t numbers_ = 0; /* names of segments */

	std::mutex mu_; /* guards what follows */
	std::condition_variable changed_;
	bool ending_ = false;
	std::map<std::string, Peer> peers_;
	std::array<kvs_batch, kOpenBatches> lists_{};
	std::vector<kvs_batch *> idle_;
	std::deque<Request *> unsent_; /* complete but for their notifications */
	std::deque<JobP> urgent_, queue_;
	std::map<int64_t, std::pair<JobP, kvs_batch *>> open_;
	Slots out_, in_;
	struct Sent {
		uint32_t offset, bytes;
		Clock::time_point at;
	};
	std::map<uint64_t, Sent> sent_; /* messages that were not read, by number */
	uint64_t seq_ = 0;
	Notifs messages_;

  public:
	explicit Client(const std::string &agent) : agent_(agent) {}

	~Client()
	{
		if (getpid() != pid_)
			return; /* a fork has no threads, and the library is inert there */
		{
			std::lock_guard lock(mu_);
			ending_ = true;
			changed_.notify_all();
		}
		if (c_)
			kvs_end(c_);
		for (size_t i = 0; i < running_; i++)
			pthread_join(threads_[i], nullptr);
		if (c_)
			kvs_close(c_);
		if (whole_.bytes)
			kvs_region_free(&whole_);
	}

	/* False: the agent cannot use this back end. */
	bool open(const char *socket);

	Status add(const BlobRange &range, Mem mem, Metadata *&out);
	Status drop(Memory *m);
	std::string conn_info() const { return kConnMagic + name_ + " " + endpoint_; }
	Status load(const std::string &agent, const std::string &info);
	Status unload(const std::string &agent);
	Status reach(const std::string &agent);
	Status find(const std::string &agent, Peer &out);

	Request *prepare(Op op, const List &local, const List &remote, const std::string &agent);
	Status post(Request &r, const Options *o);
	Status check(const Request &r);
	Status release(Request *r);
	Status notify(const std::string &agent, const std::string &text);
	void messages(Notifs &out);

  private:
	__attribute__((format(printf, 2, 3))) void warn(const char *format, ...) const;
	kvs_info info() const;
	bool ask(const char *what, int64_t request, uint32_t want, int timeout_ms);
	bool announce(Memory &m);
	bool quiet(const Memory &m, bool dropped) const;
	bool announce_all();
	void complete();
	void notes();
	void take_note(const kvs_note &n);
	void took(const Note &note, uint32_t at, const Outcome &o);

	/* With mu_ held. */
	Status find_locked(const std::string &agent, Peer &out) const;
	void pump();
	int64_t submit(const Job &job, kvs_batch *list);
	void job_ended(Request &r, const Outcome &o);
	void cancel(Request &r);
	/* kInProgress: there is no room for the message. */
	Status send(const std::string &agent, const std::string &text, Request *r);
	void was_read(uint64_t seq);
	uint32_t place(size_t bytes);
};

void Client::warn(const char *format, ...) const
{
	char text[1024];
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof text, format, args);
	va_end(args);
	fprintf(stderr, "kvspray: nixl: agent \"%.64s\": %s\n", agent_.c_str(), text);
}

kvs_info Client::info() const
{
	kvs_info out{};
	out.size = sizeof out;
	kvs_status_read(c_, &out);
	return out;
}

std::string text_of(const void *body, size_t bytes, const char *key)
{
	size_t off, len;
	const char *s;
	uint32_t n;
	if (!mp_find(body, bytes, key, &off, &len))
		return "";
	mpr r = mpr_make(static_cast<const char *>(body) + off, len);
	return mpr_str(&r, &s, &n) ? std::string(s, n) : "";
}

/* Waits for the answer to a request. */
bool Client::ask(const char *what, int64_t request, uint32_t want, int timeout_ms)
{
	if (request <= 0) {
		warn("%s: %s; %s", what, request ? kvs_strerror(static_cast<int>(request)) : "no session",
			 info().error);
		return false;
	}
	std::vector<char> body(kAnswerBytes);
	uint32_t type = 0;
	int64_t n = kvs_answer(c_, request, timeout_ms, &type, body.data(), body.size());
	if (n > 0 && type == want)
		return true;
	if (n > 0) {
		warn("%s: %s; field %s; remedy: %s", what, text_of(body.data(), n, "message").c_str(),
			 text_of(body.data(), n, "field").c_str(), text_of(body.data(), n, "remedy").c_str());
		return false;
	}
	kvs_request_forget(c_, request);
	warn("%s: %s", what,
		 n ? kvs_strerror(static_cast<int>(n)) : "the sidecar has not answered in time");
	return false;
}

bool Client::open(const char *socket)
{
	if (kvs_random(id_.data(), id_.size()) < 0) {
		warn("no random bytes");
		return false;
	}
	name_ = name_of(id_);
	kvs_config config{};
	config.size = sizeof config;
	config.role = KVS_WORKER;
	config.socket_path = socket;
	config.engine_name = "nixl";
	config.engine_version = "1.5";
	config.engine_id = name_.c_str();
	config.release = KVS_RELEASE;
	config.layers = 1;
	for (int i = 1; i < 10; i += 2)
		config.ranks[i] = 1;
	/* The box and the lists of the batches. */
	std::array<kvs_region, 1 + kOpenBatches> own{};
	int rc = kvs_open(&config, &c_);
	if (rc == 0)
		rc = kvs_region_alloc(kBoxBytes + kOpenBatches * kListBytes, &whole_);
	for (size_t i = 0; i < own.size() && rc == 0; i++)
		rc = kvs_region_part(&whole_, i ? kBoxBytes + (i - 1) * kListBytes : 0,
							 i ? kListBytes : kBoxBytes, &own[i]);
	box_.region = own[0];
	box_.bytes = kInAt;
	box_.segment = name_ + kBox;
	memories_.insert(&box_);
	for (uint32_t i = 0; i < kOpenBatches; i++) {
		lists_[i] = {own[i + 1], i + 1, kEntries, 0,
					 reinterpret_cast<kvs_entry *>(own[i + 1].addr)};
		idle_.push_back(&lists_[i]);
	}
	if (rc == 0)
		rc = kvs_start(c_, own.data(), own.size(), nullptr, 0);
	if (rc < 0 || kvs_wait_connected(c_, kAnswerMs) != 1) {
		warn("no sidecar: %s; start kvspray serve, or set XDG_RUNTIME_DIR or the option socket",
			 rc < 0 ? kvs_strerror(rc) : info().error);
		return false;
	}
	endpoint_ = info().endpoint;
	if (!announce(box_))
		return false;
	rc = kvs_thread(
		&threads_[0],
		[](void *self) -> void * {
			static_cast<Client *>(self)->complete();
			return nullptr;
		},
		this);
	if (rc == 0) {
		running_++;
		rc = kvs_thread(
			&threads_[1],
			[](void *self) -> void * {
				static_cast<Client *>(self)->notes();
				return nullptr;
			},
			this);
		running_ += rc == 0;
	}
	if (rc)
		warn("a thread: %s", strerror(rc));
	return rc == 0;
}

/* ---- registration ---- */

bool Client::announce(Memory &m)
{
	const kvs_info now = info();
	kvs_grant everyone{};
	everyone.to = "*";
	everyone.read = 1;
	everyone.write = m.writable;
	int64_t q = kvs_segment(c_, m.segment.c_str(), m.number, 0, m.bytes, &everyone, 1);
	if (!ask("register a segment", q, kMsgDone, kAnswerMs))
		return false;
	m.session = now.connects;
	return true;
}

/* Segments end with their session. */
bool Client::announce_all()
{
	std::lock_guard lock(registry_);
	const uint64_t session = info().connects;
	bool all = true;
	for (Memory *m : memories_)
		all &= m->session == session || announce(*m);
	return all;
}

/* Each session since the memory was added may be with another sidecar, whose exit has to be proved.
 * The last one may have dropped the memory instead. */
bool Client::quiet(const Memory &m, bool dropped) const
{
	const kvs_info now = info();
	return now.sidecar_exits - m.exits + dropped >= now.connects - m.sessions + 1;
}

Status Client::add(const BlobRange &range, Mem mem, Metadata *&out)
{
	std::lock_guard lock(registry_);
	if (memories_.size() >= kMaxSegments) {
		warn("register memory: %zu registrations, at most %u; register larger ranges",
			 memories_.size() - 1, kMaxSegments - 1);
		return kBackend;
	}
	auto m = std::make_unique<Memory>();
	char why[256] = "";
	int rc = mem == kVram ? kvs_region_gpu(range.addr, range.bytes, &m->region, why, sizeof why)
						  : kvs_region_process(range.addr, range.bytes, &m->region);
	kvs_wait_connected(c_, kAnswerMs); /* no exit of an earlier sidecar counts for the memory */
	const kvs_info before = info();
	m->sessions = before.connects;
	m->exits = before.sidecar_exits;
	int64_t number = rc < 0 ? rc : kvs_regions_add(c_, &m->region, 1);
	if (number < 0) {
		warn("register %zu bytes at %#zx: %s; %s", range.bytes, range.addr,
			 kvs_strerror(static_cast<int>(number)), why);
		if (rc == 0)
			kvs_region_free(&m->region);
		return number == KVS_E_ARG ? kInvalidParam : kBackend;
	}
	m->number = static_cast<uint32_t>(number);
	m->bytes = range.bytes;
	m->writable = true;
	m->segment = name_ + "/" + std::to_string(numbers_++);
	memories_.insert(m.get());
	if (kvs_wait_connected(c_, kAnswerMs) == 1 && kvs_regions_wait(c_, kAnswerMs) == 1 &&
		announce(*m)) {
		out = m.release();
		return kSuccess;
	}
	memories_.erase(m.get());
	int64_t q = kvs_regions_drop(c_, &m->number, 1);
	if (q > 0)
		kvs_request_forget(c_, q);
	kvs_region_free(&m->region);
	return kBackend;
}

/* Returns once no process accesses the memory: what uses it is cancelled, here and at the owner of
 * each batch. */
Status Client::drop(Memory *m)
{
	std::lock_guard lock(registry_);
	{
		std::lock_guard jobs(mu_);
		for (auto &[lease, entry] : open_)
			for (uint32_t number : entry.first->regions)
				if (number == m->number)
					kvs_cancel(c_, static_cast<uint64_t>(lease), "its memory is deregistered");
	}
	const bool dropped =
		ask("deregister memory", kvs_regions_drop(c_, &m->number, 1), kMsgDone, kFenceMs);
	for (auto end = Clock::now() + kExit; !quiet(*m, dropped) && Clock::now() < end;)
		std::this_thread::sleep_for(kPause / 10);
	const bool done = quiet(*m, dropped);
	memories_.erase(m);
	kvs_region_free(&m->region);
	if (!done)
		warn("deregister memory: segment %s: a sidecar may still access its memory; end that "
			 "process",
			 m->segment.c_str());
	delete m;
	return done ? kSuccess : kBackend;
}

Status Client::load(const std::string &agent, const std::string &info)
{
	Peer p;
	if (!read_conn_info(info, p)) {
		warn("connection information of %zu bytes: want \"%sID ENDPOINT\"; use one release of "
			 "kvspray",
			 info.size(), kConnMagic);
		return kInvalidParam;
	}
	std::lock_guard lock(mu_);
	if (peers_.size() >= kAgents && !peers_.count(agent)) {
		warn("%zu agents are loaded; remove some", peers_.size());
		return kBackend;
	}
	peers_[agent] = p;
	return kSuccess;
}

Status Client::unload(const std::string &agent)
{
	std::lock_guard lock(mu_);
	peers_.erase(agent);
	return kSuccess;
}

Status Client::find(const std::string &agent, Peer &out)
{
	std::lock_guard lock(mu_);
	return find_locked(agent, out);
}

Status Client::find_locked(const std::string &agent, Peer &out) const
{
	if (agent == agent_) {
		out = {"", box_.segment};
		return kSuccess;
	}
	auto it = peers_.find(agent);
	if (it == peers_.end())
		return kNotFound;
	out = it->second;
	return kSuccess;
}

Status Client::reach(const std::string &agent)
{
	Peer p;
	if (find(agent, p) != kSuccess)
		return kNotFound;
	if (p.endpoint.empty())
		return kSuccess;
	int64_t q = kvs_locate(c_, p.endpoint.c_str(), p.box.c_str(), kAnswerMs);
	return ask("connect", q, kMsgLocated, kAnswerMs + 1000) ? kSuccess : kRemoteDisconnect;
}

/* ---- jobs ---- */

int64_t Client::submit(const Job &job, kvs_batch *list)
{
	memcpy(list->entries, job.entries.data(), job.entries.size() * sizeof(kvs_entry));
	list->count = static_cast<uint32_t>(job.entries.size());
	kvs_batch_options o{};
	o.size = sizeof o;
	o.write = job.write;
	o.peer = job.endpoint.c_str();
	o.segment = job.segment.c_str();
	o.regions = job.regions.data();
	o.region_count = static_cast<uint32_t>(job.regions.size());
	o.wait = 1; /* NIXL permits transfers that overlap */
	o.note = job.note.data();
	o.note_bytes = static_cast<uint32_t>(job.note.size());
	return kvs_batch_submit(c_, list, &o);
}

void Client::pump()
{
	while (!unsent_.empty()) {
		Request *r = unsent_.front();
		Status s = send(r->agent, r->notification, r);
		if (s == kInProgress)
			break; /* tried again when a message was read */
		unsent_.pop_front();
		if (s != kSuccess)
			job_ended(*r, {KVS_FAILED, "its notification cannot be sent"});
	}
	while (!idle_.empty() && !(urgent_.empty() && queue_.empty())) {
		auto &from = urgent_.empty() ? queue_ : urgent_;
		JobP job = from.front();
		from.pop_front();
		int64_t lease = submit(*job, idle_.back());
		if (lease < 0) {
			job->done({static_cast<int>(lease), kvs_strerror(static_cast<int>(lease))});
			continue;
		}
		open_[lease] = {job, idle_.back()};
		idle_.pop_back();
	}
	changed_.notify_all();
}

void Client::complete()
{
	std::vector<uint64_t> buf(kAnswerBytes / sizeof(uint64_t));
	for (;;) {
		kvs_wait(c_, kWaitMs);
		const char *at = reinterpret_cast<char *>(buf.data());
		int64_t n = kvs_poll(c_, buf.data(), kAnswerBytes);
		std::lock_guard lock(mu_);
		if (ending_)
			return;
		for (const char *end = at + (n > 0 ? n : 0); at < end;) {
			kvs_record rec;
			memcpy(&rec, at, sizeof rec);
			const char *body = at + sizeof rec;
			at = body + (rec.body_bytes + 7) / 8 * 8;
			auto it = open_.find(static_cast<int64_t>(rec.lease));
			if (it == open_.end())
				continue;
			auto [job, list] = it->second;
			open_.erase(it);
			idle_.push_back(list);
			job->done({rec.status, text_of(body, rec.body_bytes, "reason")});
		}
		pump();
	}
}

/* Puts the ranges into one job for each remote segment and kEntries entries. NIXL has checked that
 * each range lies in the registration whose metadata it has. nullptr: the lists do not fit. */
Request *Client::prepare(Op op, const List &local, const List &remote, const std::string &agent)
{
	if (local.ranges.size() != remote.ranges.size())
		return nullptr;
	auto r = std::make_unique<Request>();
	r->agent = agent;
	std::unordered_map<const RemoteMemory *, Job *> filling;
	for (size_t i = 0; i < local.ranges.size(); i++) {
		const MetaRange &l = local.ranges[i], &x = remote.ranges[i];
		auto *here = static_cast<const Memory *>(l.metadata);
		auto *there = static_cast<const RemoteMemory *>(x.metadata);
		if (!here || !there || l.bytes != x.bytes || !l.bytes)
			return nullptr;
		Job *&job = filling[there];
		uint32_t index = job ? job->index_of(here->number) : 0;
		if (!job || job->entries.size() == kEntries || index == KVS_MAX_BATCH_REGIONS) {
			r->jobs.push_back(std::make_shared<Job>());
			job = r->jobs.back().get();
			job->write = op == kWrite;
			job->endpoint = there->endpoint;
			job->segment = there->segment;
			job->request = r.get();
			job->done = [this, q = r.get()](const Outcome &o) { job_ended(*q, o); };
			index = job->index_of(here->number);
		}
		job->entries.push_back({.local = l.addr - here->region.addr,
								.remote = x.addr - there->addr,
								.bytes = l.bytes,
								.count = 1,
								.region = index});
	}
	return r->jobs.empty() ? nullptr : r.release();
}

Status Client::post(Request &r, const Options *o)
{
	std::lock_guard lock(mu_);
	if (r.left)
		return kRepostActive;
	r.notifies = o && o->has_notification;
	r.notification = r.notifies ? o->notification : "";
	if (r.notifies && !fits(agent_, r.notification))
		return kInvalidParam;
	r.left = r.jobs.size();
	r.status = kInProgress;
	r.result = kSuccess;
	for (auto &job : r.jobs)
		queue_.push_back(job);
	pump();
	return r.status;
}

Status Client::check(const Request &r)
{
	std::lock_guard lock(mu_);
	return r.status;
}

/* A transfer that fails is reported once all of its jobs have ended: then nothing writes. */
void Client::job_ended(Request &r, const Outcome &o)
{
	r.left--;
	if (Status s = status_of(o.status); s != kSuccess && r.result == kSuccess) {
		r.result = s;
		warn("transfer with \"%.64s\": %s", r.agent.c_str(),
			 o.reason.empty() ? "the sidecar has ended" : o.reason.c_str());
		cancel(r);
	}
	if (r.left)
		return;
	if (r.result == kSuccess && r.notifies) {
		r.notifies = false;
		r.left = 1;
		unsent_.push_back(&r); /* pump() is next */
		return;
	}
	r.status = r.result;
}

/* Those that wait end at once; those that are open, after their fence. */
void Client::cancel(Request &r)
{
	r.left -= std::erase(unsent_, &r);
	for (auto *q : {&urgent_, &queue_})
		r.left -= std::erase_if(*q, [&](const JobP &job) {
			if (job->request != &r)
				return false;
			was_read(job->message);
			return true;
		});
	for (auto &[lease, entry] : open_)
		if (entry.first->request == &r)
			kvs_cancel(c_, static_cast<uint64_t>(lease), "cancelled by NIXL");
}

/* Before the fence it returns an error, and NIXL's user calls again. NIXL itself calls again where
 * it deletes the transfer, and ignores the error: then the request stays until the process ends. */
Status Client::release(Request *r)
{
	std::unique_lock lock(mu_);
	if (r->left && r->result == kSuccess)
		r->result = kCanceled;
	r->notifies = false;
	cancel(*r);
	changed_.wait_for(lock, kCancel, [&] { return !r->left; });
	if (r->left) {
		warn("release of a transfer with \"%.64s\": it is not fenced yet", r->agent.c_str());
		return kRepostActive;
	}
	delete r;
	return kSuccess;
}

/* ---- notifications ---- */

/* A place for a message. The oldest one is overwritten if it was not read: its receiver is gone. */
uint32_t Client::place(size_t bytes)
{
	uint32_t at = out_.take(bytes);
	while (at == Slots::kNone && !sent_.empty() &&
		   Clock::now() - sent_.begin()->second.at > kUnread) {
		was_read(sent_.begin()->first);
		at = out_.take(bytes);
	}
	return at;
}

void Client::was_read(uint64_t seq)
{
	auto it = sent_.find(seq);
	if (it == sent_.end())
		return;
	out_.free(it->second.offset, it->second.bytes);
	sent_.erase(it);
}

Status Client::send(const std::string &agent, const std::string &text, Request *r)
{
	Peer p;
	if (find_locked(agent, p) != kSuccess)
		return kNotFound;
	if (!fits(agent_, text))
		return kInvalidParam;
	const std::string message = write_message(agent_, text);
	const uint32_t at = place(message.size());
	if (at == Slots::kNone)
		return kInProgress;
	Note note;
	note.kind = Note::kMessage;
	note.sender = id_;
	note.seq = ++seq_;
	note.offset = at;
	note.bytes = static_cast<uint32_t>(message.size());
	note.sum = checksum(message.data(), message.size());
	memcpy(reinterpret_cast<char *>(box_.region.addr) + at, message.data(), message.size());
	sent_[note.seq] = {at, note.bytes, Clock::now()};

	auto job = std::make_shared<Job>();
	job->endpoint = p.endpoint;
	job->segment = p.box;
	job->regions = {box_.number};
	job->entries = {{.local = kByteAt + at / kSlotBytes, .bytes = 1, .count = 1}};
	job->note.assign(reinterpret_cast<const char *>(&note), sizeof note);
	job->message = note.seq;
	job->request = r;
	job->done = [this, r, agent, seq = note.seq](const Outcome &o) {
		if (o.status != KVS_OK)
			was_read(seq);
		if (r)
			job_ended(*r, o);
		else if (o.status != KVS_OK)
			warn("notification for \"%.64s\": %s", agent.c_str(), o.reason.c_str());
	};
	urgent_.push_back(job);
	return kSuccess;
}

Status Client::notify(const std::string &agent, const std::string &text)
{
	std::unique_lock lock(mu_);
	Status s = kBackend;
	bool ended = changed_.wait_for(
		lock, kRoom, [&] { return ending_ || (s = send(agent, text, nullptr)) != kInProgress; });
	if (s == kSuccess)
		pump();
	if (ended)
		return s;
	warn("notification for \"%.64s\": %zu messages were not read yet", agent.c_str(), sent_.size());
	return kBackend;
}

void Client::messages(Notifs &out)
{
	std::lock_guard lock(mu_);
	out.insert(out.end(), std::make_move_iterator(messages_.begin()),
			   std::make_move_iterator(messages_.end()));
	messages_.clear();
	changed_.notify_all();
}

void Client::notes()
{
	std::vector<char> body(kAnswerBytes);
	std::vector<kvs_note> found(KVS_MAX_NOTES);
	for (;;) {
		int n = -1;
		if (kvs_wait_connected(c_, -1) == 1 && announce_all()) {
			uint32_t type = 0;
			int64_t q = kvs_notes(c_, kNotesWaitMs);
			int64_t got = q < 0 ? q : kvs_answer(c_, q, -1, &type, body.data(), body.size());
			if (got > 0 && type == kMsgNoted)
				n = kvs_read_notes(body.data(), static_cast<uint64_t>(got), found.data(),
								   KVS_MAX_NOTES);
		}
		for (int i = 0; i < n; i++)
			take_note(found[i]);
		std::unique_lock lock(mu_);
		if (n < 0)
			changed_.wait_for(lock, kPause, [&] { return ending_; });
		if (ending_)
			return;
	}
}

void Client::take_note(const kvs_note &n)
{
	Note note;
	if (n.segment != box_.segment || !read_note(n.note, n.note_bytes, note)) {
		warn("a note of %u bytes for segment %.64s from node %.64s is none of a NIXL agent",
			 n.note_bytes, n.segment, n.from);
		return;
	}
	std::unique_lock lock(mu_);
	if (note.kind == Note::kRead) {
		was_read(note.seq);
		pump();
		return;
	}
	uint32_t at = Slots::kNone;
	changed_.wait(lock, [&] {
		return ending_ ||
			   (messages_.size() < kMessages && (at = in_.take(note.bytes)) != Slots::kNone);
	});
	if (ending_)
		return;
	auto job = std::make_shared<Job>();
	job->endpoint = n.from;
	job->segment = name_of(note.sender) + kBox;
	job->regions = {box_.number};
	job->entries = {{.local = kInAt + at, .remote = note.offset, .bytes = note.bytes, .count = 1}};
	Note read;
	read.kind = Note::kRead;
	read.seq = note.seq;
	job->note.assign(reinterpret_cast<const char *>(&read), sizeof read);
	job->done = [this, note, at](const Outcome &o) { took(note, at, o); };
	urgent_.push_back(job);
	pump();
}

void Client::took(const Note &note, uint32_t at, const Outcome &o)
{
	const char *data = reinterpret_cast<char *>(box_.region.addr) + kInAt + at;
	std::string agent, text;
	if (o.status != KVS_OK)
		warn("a notification is lost: its sender's box was not read: %s", o.reason.c_str());
	else if (checksum(data, note.bytes) != note.sum || !read_message(data, note.bytes, agent, text))
		warn("a notification is lost: its sender has overwritten it after %lld s",
			 static_cast<long long>(kUnread.count()));
	else
		messages_.emplace_back(std::move(agent), std::move(text));
	in_.free(at, note.bytes);
}

/* ---- NIXL's interface ---- */

class KvsprayEngine final : public Engine
{
	std::unique_ptr<Client> client_;

  public:
	explicit KvsprayEngine(const InitParams *p)
		: Engine(p), client_(std::make_unique<Client>(p->agent))
	{
		auto it = p->params->find("socket");
		init_error_ = !client_->open(
			it == p->params->end() || it->second.empty() ? nullptr : it->second.c_str());
	}

	bool supportsRemote() const override { return true; }
	bool supportsLocal() const override { return true; }
	bool supportsNotif() const override { return true; }
	Mems getSupportedMems() const override { return {kDram, kVram}; }

	Status registerMem(const BlobRange &range, const Mem &mem, Metadata *&out) override
	{
		if (mem != kDram && mem != kVram)
			return kNotSupported;
		return client_->add(range, mem, out);
	}
	Status deregisterMem(Metadata *m) override { return client_->drop(static_cast<Memory *>(m)); }
	Status connect(const std::string &agent) override { return client_->reach(agent); }
	Status disconnect(const std::string &agent) override { return client_->unload(agent); }
	Status unloadMD(Metadata *m) override
	{
		delete m;
		return kSuccess;
	}

	Status prepXfer(const Op &op, const List &local, const List &remote, const std::string &agent,
					Handle *&handle, const Options *) const override
	{
		handle = client_->prepare(op, local, remote, agent);
		return handle ? kSuccess : kInvalidParam;
	}
	Status postXfer(const Op &, const List &, const List &, const std::string &, Handle *&handle,
					const Options *o) const override
	{
		auto *r = static_cast<Request *>(handle);
		return client_->post(*r, o);
	}
	Status checkXfer(Handle *handle) const override
	{
		return client_->check(*static_cast<Request *>(handle));
	}
	Status releaseReqH(Handle *handle) const override
	{
		return client_->release(static_cast<Request *>(handle));
	}

	Status getPublicData(const Metadata *m, std::string &out) const override
	{
		out = static_cast<const Memory *>(m)->segment;
		return kSuccess;
	}
	Status getConnInfo(std::string &out) const override
	{
		out = client_->conn_info();
		return kSuccess;
	}
	Status loadRemoteConnInfo(const std::string &agent, const std::string &info) override
	{
		return client_->load(agent, info);
	}
	Status loadRemoteMD(const BlobRange &range, const Mem &, const std::string &agent,
						Metadata *&out) override
	{
		Peer p;
		if (client_->find(agent, p) != kSuccess)
			return kNotFound;
		if (!is_name(range.blob))
			return kInvalidParam;
		out = remote(p.endpoint, range.blob, range.addr);
		return kSuccess;
	}
	Status loadLocalMD(Metadata *in, Metadata *&out) override
	{
		auto *m = static_cast<Memory *>(in);
		out = remote("", m->segment, m->region.addr);
		return kSuccess;
	}
	Status getNotifs(Notifs &out) override
	{
		client_->messages(out);
		return kSuccess;
	}
	Status genNotif(const std::string &agent, const std::string &message) const override
	{
		return client_->notify(agent, message);
	}

  private:
	static Metadata *remote(const std::string &endpoint, const std::string &segment, uintptr_t addr)
	{
		auto *m = new RemoteMemory;
		m->endpoint = endpoint;
		m->segment = segment;
		m->addr = addr;
		return m;
	}
};

} // namespace

extern "C" __attribute__((visibility("default"))) Plugin *nixl_plugin_init()
{
	static Plugin plugin = {
		kApiVersion,
		[](const InitParams *p) -> Engine * {
			try {
				return new KvsprayEngine(p);
			} catch (const std::exception &e) {
				fprintf(stderr, "kvspray: nixl: no engine: %s\n", e.what());
				return nullptr;
			}
		},
		[](Engine *e) { delete e; },
		[] { return "KVSPRAY"; },
		[] { return KVS_RELEASE; },
		[] { return Params{{"socket", ""}}; },
		[] { return Mems{kDram, kVram}; },
	};
	return &plugin;
}
