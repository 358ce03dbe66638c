// CUDA C++ of kernels that GPUs of a mesh run, on a CPU: each thread is a fiber, kernels of a GPU run in order, and GPUs
// take turns at random. Blocks of a kernel are all resident. Accesses take effect in order, as fences are not imitated.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

#define __device__
#define __forceinline__ inline
#define threadIdx current->thread
#define blockIdx current->block->index
#define blockDim current->block->threads
#define gridDim current->block->blocks

using std::max;
using std::min;

struct Index { unsigned x; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

struct Pointer {
  void* address;
  template <class T> operator T*() const { return (T*)address; }
};
struct Launch { unsigned blocks, threads; std::function<void()> body; };
struct Barrier { unsigned arrived = 0, phase = 0; };
struct Block {
  Index index, threads, blocks;
  unsigned number;  // among those of all GPUs, for shared memory
  std::map<int, Barrier> barriers;
  std::vector<float> lanes;
};
struct Fiber {
  Block* block = nullptr;
  Index thread{};
  const std::function<void()>* body = nullptr;
  bool is_done = false, is_started = false;
  const Barrier* barrier = nullptr;
  unsigned phase = 0, shuffles = 0;
  ucontext_t begin;
  jmp_buf at;
  std::unique_ptr<char[]> stack;
};
constexpr size_t STACK = 32 << 10;
constexpr unsigned MAX_BLOCKS = 64, NAMED_BARRIERS = 16;

inline Fiber* current;
inline jmp_buf scheduler;
inline uint64_t turns;
inline bool is_trapped;

__attribute__((noinline)) inline void yield() { if (!_setjmp(current->at)) _longjmp(scheduler, 1); }
inline void run_fiber() { for (;; yield()) { (*current->body)(); current->is_done = true; } }
inline void resume(Fiber& fiber) {
  current = &fiber;
  if (_setjmp(scheduler)) return;
  if (fiber.is_started) _longjmp(fiber.at, 1);
  fiber.is_started = true;
  getcontext(&fiber.begin);
  fiber.begin.uc_stack.ss_sp = fiber.stack.get();
  fiber.begin.uc_stack.ss_size = STACK;
  makecontext(&fiber.begin, run_fiber, 0);
  setcontext(&fiber.begin);
}

inline void meet(int id, unsigned count) {
  Barrier& barrier = current->block->barriers[id];
  current->phase = barrier.phase;
  if (++barrier.arrived == count) { barrier.arrived = 0; barrier.phase++; return; }
  current->barrier = &barrier;
  yield();
  current->barrier = nullptr;
}
inline void __syncthreads() { meet(0, blockDim.x); }
inline void __syncwarp() { meet(NAMED_BARRIERS + threadIdx.x / 32, 32); }
inline float __shfl_xor_sync(unsigned, float value, int lanes) {
  float* values = current->block->lanes.data() + current->shuffles++ % 2 * blockDim.x;
  values[threadIdx.x] = value;
  __syncwarp();
  return values[threadIdx.x ^ lanes];
}
inline void __trap() { is_trapped = true; for (;;) yield(); }
template <class T> T __ldcg(const T* from) { return *from; }
template <class To, class From> To bits(From from) { To to; memcpy(&to, &from, sizeof to); return to; }
inline unsigned __float_as_uint(float value) { return bits<unsigned>(value); }
inline float __uint_as_float(unsigned value) { return bits<float>(value); }
inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }

// Instructions of PTX, by the first one of a statement: its operands in order.
inline void mov_u64(unsigned long long& time) { time = turns * 1000000; }
inline void fence_acq_rel_sys(unsigned* flag, unsigned value) { *flag = value; }
inline void ld_acquire_sys_global_u32(unsigned& seen, const unsigned* flag) { yield(); seen = *(volatile const unsigned*)flag; }
inline void bar_sync(int id, int threads) { meet(id, threads); }
inline void cvt_rn_f16x2_f32(unsigned& to, float high, float low) {
  _Float16 halves[] = {(_Float16)low, (_Float16)high};
  memcpy(&to, halves, 4);
}
inline void mov_b32(float& low, float& high, unsigned from) {
  _Float16 halves[2];
  memcpy(halves, &from, 4);
  low = halves[0], high = halves[1];
}
inline void st_volatile_global_v4_u32(char* to, unsigned a, unsigned epoch, unsigned b) {
  unsigned line[] = {a, epoch, b, epoch};
  memcpy(to, line, 16);
}
inline void ld_volatile_global_v4_u32(unsigned& a, unsigned& flag, unsigned& b, unsigned& flag2, const char* from) {
  yield();
  unsigned line[4];
  memcpy(line, from, 16);
  a = line[0], flag = line[1], b = line[2], flag2 = line[3];
}

// Run kernels of each GPU; returns 0 when all have ended, 1 if a thread trapped, 2 if threads wait for each other.
inline int run(const std::vector<std::vector<Launch>>& gpus, unsigned seed) {
  struct Gpu { size_t next = 0, count = 0; std::vector<Block> blocks; std::vector<std::unique_ptr<Fiber>> fibers; };
  std::vector<Gpu> states(gpus.size());
  std::mt19937 random(seed);
  turns = 0, is_trapped = false;
  for (size_t left = gpus.size(); left;) {
    size_t rank = random() % gpus.size();
    unsigned late = random() & random();  // warps of each block that do nothing
    Gpu& gpu = states[rank];
    for (int turn = 1 << random() % 8; turn && gpu.next <= gpus[rank].size(); --turn) {
      size_t offset = random(), waiting = 0;
      for (size_t i = 0; i < gpu.count; ++i) {
        Fiber& fiber = *gpu.fibers[(i + offset) % gpu.count];
        bool waits = fiber.barrier && fiber.barrier->phase == fiber.phase;
        if (!fiber.is_done && !waits && !(late >> fiber.thread.x / 32 % 32 & 1)) resume(fiber);
        waiting += !fiber.is_done;
      }
      if (is_trapped) return 1;
      if (++turns > 200000) return 2;
      if (waiting) continue;
      if (gpu.next == gpus[rank].size()) { gpu.next++, gpu.count = 0, left--; break; }
      const Launch& launch = gpus[rank][gpu.next++];
      gpu.count = launch.blocks * launch.threads;
      gpu.blocks.clear();
      for (unsigned b = 0; b < launch.blocks; ++b) {
        unsigned number = rank * MAX_BLOCKS / gpus.size() + b;
        gpu.blocks.push_back({{b}, {launch.threads}, {launch.blocks}, number, {}, std::vector<float>(2 * launch.threads)});
      }
      for (unsigned i = 0; i < gpu.count; ++i) {
        if (i == gpu.fibers.size()) gpu.fibers.emplace_back(new Fiber)->stack.reset(new char[STACK]);
        Fiber& fiber = *gpu.fibers[i];
        fiber.block = &gpu.blocks[i / launch.threads], fiber.thread = {i % launch.threads};
        fiber.body = &launch.body, fiber.is_done = false, fiber.shuffles = 0;
      }
    }
  }
  return 0;
}
