// The shim's kernels for flags of captured graphs. internal/sys/cuda/kernels/generate.py makes flag_ptx.h of it.

typedef unsigned long long u64;

// kvs_flag: copies the step number that the shim wrote to `step` before the graph was launched into a flag, which lives in
// host-mapped memory. The fence before it orders every write that this GPU made to the layer's cache.
extern "C" __global__ void kvs_flag(const volatile u64 *step, volatile u64 *flag)
{
	__threadfence_system();
	*flag = *step;
}

// kvs_step: before a graph is launched, clears the replay flags of all layers and records which step those that the graph sets belong
// to (board.h). A reader that sees the step also sees the zeros: each thread's fence, and the barrier, order them before it.
extern "C" __global__ void kvs_step(u64 step, u64 *word, volatile u64 *replay, unsigned layers)
{
	const unsigned stride = 8; // words from one flag to the next
	for (unsigned i = threadIdx.x; i < layers; i += blockDim.x)
		replay[i * stride] = 0;
	__threadfence_system();
	__syncthreads();
	if (threadIdx.x == 0) {
		*word = step;
		__threadfence_system();
		replay[layers * stride] = step;
	}
}
