/* nixl_abi.h: what NIXL 1.5 passes to a back end, to the byte. NIXL's wheels have no headers.
 *
 * The functions of Engine have the order of NIXL's virtual table, and the fields the offsets that
 * its code uses. tests/test_abi.py compares the order with the table of an installed wheel.
 * Parameters that this back end does not read are pointers without a type.
 */
#ifndef KVSPRAY_NIXL_ABI_H
#define KVSPRAY_NIXL_ABI_H

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace nixl_abi
{

constexpr int kApiVersion = 1;

enum Mem : int { kDram = 0, kVram = 1 };
enum Op : int { kRead = 0, kWrite = 1 };
enum Status : int {
	kInProgress = 1,
	kSuccess = 0,
	kNotPosted = -1,
	kInvalidParam = -2,
	kBackend = -3,
	kNotFound = -4,
	kRepostActive = -7,
	kNotSupported = -9,
	kRemoteDisconnect = -10,
	kCanceled = -11,
};

using Params = std::unordered_map<std::string, std::string>;
using Mems = std::vector<Mem>;
using Notifs = std::vector<std::pair<std::string, std::string>>; /* agent, message */

struct InitParams {
	std::string agent, type;
	Params *params;
	bool progress_thread;
	uint64_t progress_delay_us;
	int sync_mode;
	bool telemetry;
};
static_assert(sizeof(InitParams) == 96);

/* The base of what a back end keeps for registered memory; NIXL deletes none. */
struct Metadata {
	bool is_private;
	explicit Metadata(bool p) : is_private(p) {}
	virtual ~Metadata() = default;
};

struct Handle {
	virtual ~Handle() = default;
};

struct Range {
	uintptr_t addr;
	size_t bytes;
	uint64_t device;
};

struct BlobRange : Range {
	std::string blob;
};
static_assert(sizeof(BlobRange) == 56);

struct MetaRange : Range {
	Metadata *metadata;
};
static_assert(sizeof(MetaRange) == 32);

/* Only read: NIXL makes the lists. */
struct List {
	virtual ~List() = default;
	Mem type;
	std::vector<MetaRange> ranges;
};
static_assert(sizeof(List) == 40);

struct Options {
	std::string notification;
	bool has_notification;
	std::string custom;
};
static_assert(sizeof(Options) == 72);

class Engine
{
	std::string type_;
	Params params_;
	std::vector<uint64_t> telemetry_; /* always empty: the type of its elements does not matter */
	std::mutex telemetry_lock_;

  protected:
	bool init_error_ = false;
	const std::string agent_;
	const bool telemetry_on_;

  public:
	explicit Engine(const InitParams *p)
		: type_(p->type), params_(*p->params), agent_(p->agent), telemetry_on_(p->telemetry)
	{
	}
	Engine(const Engine &) = delete;
	Engine &operator=(const Engine &) = delete;
	virtual ~Engine() = default;

	virtual bool supportsRemote() const = 0;
	virtual bool supportsLocal() const = 0;
	virtual bool supportsNotif() const = 0;
	virtual Mems getSupportedMems() const = 0;
	virtual Status registerMem(const BlobRange &range, const Mem &mem, Metadata *&out) = 0;
	virtual Status deregisterMem(Metadata *metadata) = 0;
	virtual Status connect(const std::string &agent) = 0;
	virtual Status disconnect(const std::string &agent) = 0;
	virtual Status unloadMD(Metadata *metadata) = 0;
	virtual Status prepXfer(const Op &op, const List &local, const List &remote,
							const std::string &agent, Handle *&handle, const Options *o) const = 0;
	virtual Status postXfer(const Op &op, const List &local, const List &remote,
							const std::string &agent, Handle *&handle, const Options *o) const = 0;
	virtual Status checkXfer(Handle *handle) const = 0;
	virtual Status releaseReqH(Handle *handle) const = 0;
	/* For memory that a GPU's kernels use: of remote agents, of this one. */
	virtual Status prepMemView(const void *, void *&, const Options *) const
	{
		return kNotSupported;
	}
	virtual Status prepMemView(const List &, void *&, const Options *) const
	{
		return kNotSupported;
	}
	virtual void releaseMemView(void *) const {}
	virtual Status getPublicData(const Metadata *metadata, std::string &out) const = 0;
	virtual Status getConnInfo(std::string &out) const = 0;
	virtual Status loadRemoteConnInfo(const std::string &agent, const std::string &info) = 0;
	virtual Status loadRemoteMD(const BlobRange &range, const Mem &mem, const std::string &agent,
								Metadata *&out) = 0;
	virtual Status loadLocalMD(Metadata *in, Metadata *&out) = 0;
	virtual Status getNotifs(Notifs &out) = 0;
	virtual Status genNotif(const std::string &agent, const std::string &message) const = 0;
	virtual Status queryMem(const void *, void *) const { return kNotSupported; }
	virtual Status estimateXferCost(const Op &, const List &, const List &, const std::string &,
									Handle *const &, void *, void *, void *, const void *) const
	{
		return kNotSupported;
	}
};
static_assert(sizeof(Engine) == 208);

struct Plugin {
	int api_version;
	Engine *(*create)(const InitParams *);
	void (*destroy)(Engine *);
	const char *(*name)();
	const char *(*version)();
	Params (*options)();
	Mems (*mems)();
};

} // namespace nixl_abi

#endif
