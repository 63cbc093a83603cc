// Tell where the process crashed: TVM's handler says nothing where the stack is full or a call went to no code.
#ifndef RELAXTUNE_TESTS_CRASH_H_
#define RELAXTUNE_TESTS_CRASH_H_

#include <execinfo.h>
#include <unistd.h>

#include <csignal>
#include <cstring>

inline void PrintCrash(int number, siginfo_t*, void*) {
  const char text[] = "crashed here:\n";
  (void)!write(STDERR_FILENO, text, sizeof(text) - 1);
  void* frames[64];
  backtrace_symbols_fd(frames, backtrace(frames, 64), STDERR_FILENO);
  raise(number);  // its handler is the default one again
}

// On a stack of its own.
inline void PrintCrashes() {
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

#endif  // RELAXTUNE_TESTS_CRASH_H_
