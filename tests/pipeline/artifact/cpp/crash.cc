// Tell where the process crashed. TVM's handler, which takes the place of any before it, says nothing after a call to a
// place without code or on a full stack, and Python's is gone once the interpreter has ended: so this one is native, on a
// stack of its own, and goes in after TVM's library. What it cannot see is a crash of a thread that blocks signals, as
// CUDA's own threads do.
#include <dlfcn.h>
#include <execinfo.h>
#include <ucontext.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <initializer_list>

namespace {

void Say(const char* text) { (void)!write(STDERR_FILENO, text, std::strlen(text)); }

void PrintCrash(int number, siginfo_t* info, void* context) {
  const auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  void* code = reinterpret_cast<void*>(registers[REG_RIP]);
  char text[128];
  std::snprintf(text, sizeof(text), "crashed: signal %d, address %p, code at %p\n", number, info->si_addr, code);
  Say(text);
  void* frames[64];
  Dl_info place;
  if (dladdr(code, &place) == 0) {
    // There is no code: who called is on top of the stack, and nothing else can be found out.
    frames[0] = *reinterpret_cast<void**>(registers[REG_RSP]);
    Say("which is no library's, called from:\n");
    backtrace_symbols_fd(frames, 1, STDERR_FILENO);
  } else {
    backtrace_symbols_fd(frames, backtrace(frames, 64), STDERR_FILENO);
  }
  raise(number);  // its handler is the default one again
}

}  // namespace

extern "C" void print_crashes() {
  static char memory[1 << 16];
  void* frame[1];
  backtrace(frame, 1);  // loads what unwinds
  stack_t stack{};
  stack.ss_sp = memory;
  stack.ss_size = sizeof(memory);
  sigaltstack(&stack, nullptr);
  struct sigaction action {};
  action.sa_sigaction = PrintCrash;
  action.sa_flags = SA_ONSTACK | SA_RESETHAND | SA_SIGINFO;
  for (int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) sigaction(number, &action, nullptr);
}
