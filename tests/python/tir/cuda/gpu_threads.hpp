// CUDA C++ on a CPU: each thread is a fiber, kernels of a GPU run in order, and GPUs take turns at random. All blocks of
// a kernel are resident. Accesses take effect in order: fences are not imitated.
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
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
float2 make_float2(float x, float y) { return {x, y}; }
float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Pointer { void* address; template <class T> operator T*() const { return (T*)address; } };
struct Launch { unsigned blocks, threads; std::function<void()> body; };
struct Barrier { unsigned arrived = 0, phase = 0; };
struct Block { Index index, threads, blocks; unsigned number; std::map<int, Barrier> barriers; std::vector<float> lanes; };
struct Fiber {
  Block* block;
  Index thread;
  const std::function<void()>* body;
  bool is_done;
  const Barrier* barrier = nullptr;
  unsigned phase, shuffles = 0;
  ucontext_t context;
  char stack[32 << 10];
};
constexpr unsigned MAX_BLOCKS = 64, NAMED_BARRIERS = 16, MAX_TURNS = 100000;
Fiber* current;
ucontext_t scheduler;
unsigned turns;
bool is_trapped;
std::mt19937 random_bits;

void yield() { swapcontext(&current->context, &scheduler); }
void run_fiber() { for (;; yield()) { (*current->body)(); current->is_done = true; } }
Fiber* new_fiber() {
  Fiber* fiber = new Fiber;
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack, fiber->context.uc_stack.ss_size = sizeof fiber->stack;
  makecontext(&fiber->context, run_fiber, 0);
  return fiber;
}
void meet(int id, unsigned count) {
  Barrier& barrier = current->block->barriers[id];
  current->phase = barrier.phase;
  if (++barrier.arrived == count) { barrier.arrived = 0; barrier.phase++; return; }
  current->barrier = &barrier;
  yield();
  current->barrier = nullptr;
}
void __syncthreads() { meet(0, blockDim.x); }
void __syncwarp() { meet(NAMED_BARRIERS + threadIdx.x / 32, 32); }
float __shfl_xor_sync(unsigned, float value, int lanes) {
  float* values = current->block->lanes.data() + current->shuffles++ % 2 * blockDim.x;
  values[threadIdx.x] = value;
  __syncwarp();
  return values[threadIdx.x ^ lanes];
}
void __trap() { for (is_trapped = true;;) yield(); }
template <class T> T __ldcg(const T* from) { return *from; }
unsigned __float_as_uint(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }
float __uint_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
unsigned __shfl_xor_sync(unsigned mask, unsigned bits, int lanes) {
  return __float_as_uint(__shfl_xor_sync(mask, __uint_as_float(bits), lanes));
}
float rsqrtf(float value) { return 1.0f / sqrtf(value); }

// Statements of PTX, by their first instruction, as functions of their operands.
void mov_u64(unsigned long long& time) { time = turns * 1000000ull; }
void st_release_sys_global_u32(unsigned* flag, unsigned value) { *flag = value; }
void ld_acquire_sys_global_u32(unsigned& seen, const unsigned* flag) { yield(); seen = *(volatile const unsigned*)flag; }
void bar_sync(int id, int threads) { meet(id, threads); }
void cvt_rn_f16x2_f32(unsigned& to, float high, float low) { _Float16 h[2] = {low, high}; memcpy(&to, h, 4); }
void mov_b32(float& low, float& high, unsigned h) { _Float16 v[2]; memcpy(v, &h, 4); low = v[0], high = v[1]; }
void st_volatile_global_v4_u32(long long to, unsigned x, unsigned y, unsigned z, unsigned w) {
  for (unsigned word : {x, y, z, w}) {
    memcpy((void*)to, &word, 4), to += 4;
    if (word && random_bits() % 64 == 0) yield();  // words of a vector may arrive one by one
  }
}
void ld_volatile_global_v4_u32(unsigned& x, unsigned& y, unsigned& z, unsigned& w, long long from) {
  yield();
  for (unsigned *each : {&x, &y, &z, &w}) memcpy(each, (const void*)from, 4), from += 4;
}
void atomicAdd(unsigned* to, unsigned by) { *to += by; }

// Run kernels of each GPU. Returns 0 when all have ended, 1 if a thread trapped, 2 if threads wait for each other.
int run(const std::vector<std::vector<Launch>>& gpus, unsigned seed) {
  struct Gpu { size_t next = 0, count = 0; std::vector<Block> blocks; std::vector<std::unique_ptr<Fiber>> fibers; };
  std::vector<Gpu> states(gpus.size());
  random_bits.seed(seed);
  turns = 0, is_trapped = false;
  for (size_t left = gpus.size(); left;) {
    size_t rank = random_bits() % gpus.size();
    Gpu& gpu = states[rank];
    unsigned late = random_bits() & random_bits();  // warps of each block that do nothing
    for (int turn = 1 << random_bits() % 8; turn && gpu.next <= gpus[rank].size(); --turn) {
      size_t offset = random_bits(), waiting = 0;
      for (size_t i = 0; i < gpu.count; ++i) {
        Fiber& fiber = *gpu.fibers[(i + offset) % gpu.count];
        bool waits = fiber.barrier && fiber.barrier->phase == fiber.phase;
        if (!fiber.is_done && !waits && !(late >> fiber.thread.x / 32 % 32 & 1)) current = &fiber, swapcontext(&scheduler, &fiber.context);
        waiting += !fiber.is_done;
      }
      if (is_trapped || ++turns > MAX_TURNS) return is_trapped ? 1 : 2;
      if (waiting) continue;
      if (gpu.next++ == gpus[rank].size()) { left--; break; }
      const Launch& launch = gpus[rank][gpu.next - 1];
      gpu.count = launch.blocks * launch.threads;
      gpu.blocks.clear();
      for (unsigned b = 0, first = rank * MAX_BLOCKS / gpus.size(); b < launch.blocks; ++b)
        gpu.blocks.push_back({b, launch.threads, launch.blocks, first + b, {}, std::vector<float>(2 * launch.threads)});
      while (gpu.fibers.size() < gpu.count) gpu.fibers.emplace_back(new_fiber());
      for (unsigned i = 0; i < gpu.count; ++i) {
        Fiber& fiber = *gpu.fibers[i];
        fiber.block = &gpu.blocks[i / launch.threads], fiber.thread = {i % launch.threads};
        fiber.body = &launch.body, fiber.is_done = false, fiber.shuffles = 0;
      }
    }
  }
  return 0;
}
