// Fibers, barriers, bulk copies and the launch; see include/simt.h.
#include "simt.h"

#include <condition_variable>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <sched.h>
#include <sys/mman.h>
#include <thread>
#include <ucontext.h>
#include <unistd.h>
#include <vector>

#include "ep/args.h"
#include "nvshmem.h"
#include "ep/stage.cuh"

thread_local simt::Index threadIdx, blockIdx, blockDim, gridDim;
namespace ep {
thread_local __align__(128) unsigned char stage_memory[224 << 10];
}

namespace simt {
namespace {

constexpr size_t kStack = 128 << 10;
using Entry = void (*)(ep::Args);

[[noreturn]] void die(const char* why) {
  fprintf(stderr, "emulator: %s (block %u, thread %u)\n", why, blockIdx.x, threadIdx.x);
  abort();
}

struct Copy {
  void* to;
  const void* from;
  uint32_t bytes;
  std::unique_ptr<unsigned char[]> read;   // a store whose source has been read
};

struct Fiber {
  unsigned id = 0;
  ucontext_t start;
  jmp_buf at;
  bool started = false;       // it is in body's loop
  unsigned turn = 0;          // warp operations so far
  std::vector<Copy> stores;
};

struct Warp {
  uint64_t value[2][32];
  unsigned arrived = 0, live = 32;
  std::vector<Fiber*> waiting;
};

struct Barrier {
  unsigned arrived = 0, needed = 0;
  int all = 1, result = 1;
  std::vector<Fiber*> waiting;
};

struct Load {
  uint64_t* bar;
  Copy copy;
};
struct Expect {
  uint64_t* bar;
  uint64_t expected = 0, issued = 0;
  bool armed = false;
};

struct Job {
  Entry entry;
  const ep::Args* args;
  unsigned blocks, threads, seed;
};

// What one OS thread runs, one block after the other; its fibers stay.
struct Block {
  Job job;
  std::deque<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barriers[16];
  std::deque<Fiber*> ready;
  std::vector<Load> loads;
  std::vector<Expect> expects;
  Fiber* now = nullptr;
  unsigned live = 0, idle = 0, naps = 0;
  jmp_buf over;
  std::minstd_rand random;
};
thread_local Block* block;

void wake(std::vector<Fiber*>& waiting) {
  for (Fiber* f : waiting) block->ready.push_back(f);
  waiting.clear();
  block->idle = block->naps = 0;
}

[[noreturn]] void resume(Fiber* f) {
  block->now = f;
  threadIdx.x = f->id;
  if (f->started) _longjmp(f->at, 1);
  f->started = true;
  setcontext(&f->start);
  die("setcontext failed");
}

[[noreturn]] void next() {
  Block& b = *block;
  if (b.ready.empty()) {
    if (b.live == 0) _longjmp(b.over, 1);
    die("every thread waits at a barrier that the others never reach");
  }
  size_t pick = b.random() % std::min<size_t>(b.ready.size(), 8);
  std::swap(b.ready[pick], b.ready.front());
  Fiber* f = b.ready.front();
  b.ready.pop_front();
  resume(f);
}
void leave() {
  if (_setjmp(block->now->at) == 0) next();
}

void release(Barrier& b) {
  b.result = b.all;
  b.arrived = 0;
  b.all = 1;
  wake(b.waiting);
}

void write(Copy& c) { memcpy(c.to, c.read ? c.read.get() : c.from, c.bytes); }

void finish() {
  Block& b = *block;
  Fiber& f = *b.now;
  for (Copy& c : f.stores) write(c);
  f.stores.clear();
  --b.live;
  Warp& w = b.warps[f.id / 32];
  --w.live;
  if (w.live != 0 and w.arrived == w.live) {
    w.arrived = 0;
    wake(w.waiting);
  }
  Barrier& whole = b.barriers[0];
  if (b.live != 0 and whole.arrived == b.live) release(whole);
  b.idle = 0;
  leave();   // until the next block
}

void body() {
  for (;;) {
    block->job.entry(*block->job.args);
    finish();
  }
}

Fiber& fiber(unsigned id) {
  Block& b = *block;
  while (b.fibers.size() <= id) {
    Fiber& f = b.fibers.emplace_back();
    f.id = unsigned(b.fibers.size() - 1);
    void* stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) die("no memory for a stack");
    getcontext(&f.start);
    f.start.uc_stack.ss_sp = stack;
    f.start.uc_stack.ss_size = kStack;
    f.start.uc_link = nullptr;
    makecontext(&f.start, body, 0);
  }
  return b.fibers[id];
}

void run(const Job& job, unsigned index) {
  static thread_local Block* mine = new Block;
  block = mine;
  Block& b = *block;
  b.job = job;
  b.random.seed(job.seed * 7919 + index + 1);
  b.live = job.threads;
  blockIdx = {index, 0, 0};
  blockDim = {job.threads, 1, 1};
  gridDim = {job.blocks, 1, 1};
  memset(ep::stage_memory, 0xff, sizeof ep::stage_memory);   // NaN
  b.warps.assign(job.threads / 32, Warp{});
  b.expects.clear();
  for (unsigned t = 0; t < job.threads; ++t) {
    fiber(t).turn = 0;
    b.ready.push_back(&b.fibers[t]);
  }
  if (_setjmp(b.over) == 0) next();
}

// An OS thread that runs one block of each launch.
class Multiprocessor {
 public:
  Multiprocessor() { std::thread([this] { serve(); }).detach(); }
  void start(const Job& job, unsigned index) {
    std::lock_guard<std::mutex> hold(lock_);
    job_ = job;
    index_ = index;
    busy_ = true;
    changed_.notify_all();
  }
  void await() {
    std::unique_lock<std::mutex> hold(lock_);
    changed_.wait(hold, [this] { return not busy_; });
  }

 private:
  void serve() {
    for (;;) {
      std::unique_lock<std::mutex> hold(lock_);
      changed_.wait(hold, [this] { return busy_; });
      hold.unlock();
      run(job_, index_);
      hold.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }
  std::mutex lock_;
  std::condition_variable changed_;
  Job job_{};
  unsigned index_ = 0;
  bool busy_ = false;
};

bool chance(unsigned one_in) { return block->random() % one_in == 0; }

Expect& expect_of(uint64_t* bar) {
  for (Expect& e : block->expects)
    if (e.bar == bar) return e;
  block->expects.push_back({bar});
  return block->expects.back();
}

int meet(Barrier& b, unsigned needed, int ok) {
  b.all &= ok != 0;
  if (++b.arrived == needed) {
    release(b);
  } else {
    b.waiting.push_back(block->now);
    leave();
  }
  return b.result;
}

unsigned delay_us() {
  static unsigned us = getenv("EP_EMULATOR_DELAY_US") ? unsigned(atoi(getenv("EP_EMULATOR_DELAY_US"))) : 0;
  return us;
}

}  // namespace

uint64_t exchange_begin(uint64_t value) {
  Block& b = *block;
  Fiber& f = *b.now;
  Warp& w = b.warps[f.id / 32];
  w.value[f.turn++ & 1][f.id % 32] = value;
  if (++w.arrived == w.live) {
    w.arrived = 0;
    wake(w.waiting);
  } else {
    w.waiting.push_back(&f);
    leave();
  }
  return 0;
}
uint64_t exchange_read(unsigned lane) {
  Fiber& f = *block->now;
  return block->warps[f.id / 32].value[(f.turn - 1) & 1][lane];
}

void sync_block() { meet(block->barriers[0], block->live, 1); }
int sync_block_and(int ok) { return meet(block->barriers[0], block->live, ok); }
int sync_some_and(int id, int threads, int ok) { return meet(block->barriers[id], unsigned(threads), ok); }

void pass() {
  Block& b = *block;
  b.ready.push_back(b.now);
  if (++b.idle > 2 * b.ready.size() + 16) {   // nobody meets anybody: others of this machine should run
    b.idle = 0;
    if (b.naps < 5) ++b.naps;
    usleep(20u << b.naps);
  }
  leave();
}

void bulk_expect(uint64_t* bar, uint32_t bytes) {
  Expect& e = expect_of(bar);
  if (e.armed) die("a bulk load begins while the one before has not been awaited");
  e.armed = true;
  e.expected = bytes;
}
void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* bar) {
  if (bytes % 16 or uintptr_t(to) % 16 or uintptr_t(from) % 16) die("a bulk load is not aligned to 16 bytes");
  if (bytes == 0) die("a bulk load of no bytes");
  if (static_cast<unsigned char*>(to) < ep::stage_memory or
      static_cast<unsigned char*>(to) + bytes > ep::stage_memory + sizeof ep::stage_memory)
    die("a bulk load leaves shared memory");
  expect_of(bar).issued += bytes;
  block->loads.push_back({bar, {to, from, bytes, nullptr}});
}
void bulk_await(uint64_t* bar, uint32_t parity) {
  for (;;) {
    if ((*bar & 1) != parity) return;   // that phase has ended
    Expect& e = expect_of(bar);
    if (e.armed and e.issued == e.expected) {
      for (size_t i = 0; i < block->loads.size();) {
        if (block->loads[i].bar != bar) {
          ++i;
          continue;
        }
        write(block->loads[i].copy);
        std::swap(block->loads[i], block->loads.back());
        block->loads.pop_back();
      }
      e.armed = false;
      e.issued = 0;
      *bar ^= 1;
      return;
    }
    pass();
  }
}
void bulk_store(void* to, const void* from, uint32_t bytes) {
  if (bytes % 16 or uintptr_t(to) % 16 or uintptr_t(from) % 16) die("a bulk store is not aligned to 16 bytes");
  block->now->stores.push_back({to, from, bytes, nullptr});
}
void misaligned() { die("a vector store is not aligned to 16 bytes"); }
void bulk_await_read() {
  for (Copy& c : block->now->stores) {
    if (c.read) continue;
    c.read.reset(new unsigned char[c.bytes]);
    memcpy(c.read.get(), c.from, c.bytes);
  }
  if (chance(2)) bulk_await_stored();
}
void bulk_await_stored() {
  for (Copy& c : block->now->stores) write(c);
  block->now->stores.clear();
}
// Symmetric heaps as this process maps them, and the puts under way.
struct Network {
  struct Region {
    char* own;
    size_t size;
    std::vector<char*> peers;
  };
  struct Put {
    char* to;
    const void* from;
    size_t bytes;
    uint64_t* word;
    uint64_t value;
    int op;
  };
  std::mutex lock;
  std::condition_variable given, quiet;
  bool busy = false;
  std::vector<Region> regions;
  std::vector<Put> puts;
  std::minstd_rand random;

  Network() : random(unsigned(getpid())) { std::thread([this] { deliver(); }).detach(); }
  char* there(void* own, int pe) {
    for (Region& r : regions)
      if (own >= r.own and own < r.own + r.size) return r.peers[unsigned(pe)] + (static_cast<char*>(own) - r.own);
    die("a put to memory that is no symmetric heap");
  }
  void deliver() {
    for (;;) {
      std::unique_lock<std::mutex> hold(lock);
      given.wait(hold, [this] { return not puts.empty(); });
      if (random() % 4 == 0) {   // others may overtake
        hold.unlock();
        usleep(random() % 100);
        hold.lock();
      }
      std::swap(puts[random() % puts.size()], puts.back());
      Put p = puts.back();
      puts.pop_back();
      busy = true;
      hold.unlock();
      if (p.bytes != 0) memcpy(p.to, p.from, p.bytes);
      if (p.op == NVSHMEM_SIGNAL_ADD) {
        __atomic_fetch_add(p.word, p.value, __ATOMIC_SEQ_CST);
      } else {
        __atomic_store_n(p.word, p.value, __ATOMIC_SEQ_CST);
      }
      hold.lock();
      busy = false;
      quiet.notify_all();
    }
  }
};
static Network& network() {
  static auto* n = new Network;
  return *n;
}
void put_signal(void* to, const void* from, size_t bytes, uint64_t* word, uint64_t value, int op, int pe) {
  Network& n = network();
  std::lock_guard<std::mutex> hold(n.lock);
  char* there = bytes != 0 ? n.there(to, pe) : nullptr;
  n.puts.push_back({there, from, bytes, reinterpret_cast<uint64_t*>(n.there(word, pe)), value, op});
  n.given.notify_one();
}

void maybe_delay() {
  if (delay_us() != 0 and chance(4)) usleep(block->random() % delay_us());
}
uint64_t nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1000000000 + uint64_t(t.tv_nsec);
}

}  // namespace simt

// Returns when every block has ended. Launches of different streams may overlap.
extern "C" void emulator_launch(simt::Entry entry, const ep::Args* args, unsigned blocks, unsigned threads, unsigned seed,
                                unsigned stream, unsigned apart) {
  static auto* streams = new std::map<unsigned, std::vector<simt::Multiprocessor*>>;
  static std::mutex lock;
  std::unique_lock<std::mutex> hold(lock);
  std::vector<simt::Multiprocessor*>& all = (*streams)[stream];
  hold.unlock();
  while (all.size() < blocks) all.push_back(new simt::Multiprocessor);
  for (unsigned b = blocks; b-- > 0;) {
    all[b]->start({entry, args, blocks, threads, seed}, b);
    if (apart) all[b]->await();
  }
  for (unsigned b = 0; b < blocks; ++b) all[b]->await();
}
extern "C" void emulator_join(char* own, size_t size, char** peers, unsigned ranks) {
  simt::Network& n = simt::network();
  std::lock_guard<std::mutex> hold(n.lock);
  n.regions.push_back({own, size, std::vector<char*>(peers, peers + ranks)});
}
extern "C" void emulator_leave(char* own) {   // nothing is under way to heaps that are about to go
  simt::Network& n = simt::network();
  std::unique_lock<std::mutex> hold(n.lock);
  n.quiet.wait(hold, [&n] { return n.puts.empty() and not n.busy; });
  for (size_t i = 0; i < n.regions.size(); ++i)
    if (n.regions[i].own == own) {
      n.regions.erase(n.regions.begin() + long(i));
      return;
    }
}
extern "C" void emulator_set_word(uint64_t* word) { __atomic_store_n(word, 1, __ATOMIC_RELEASE); }
