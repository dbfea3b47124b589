/*
 * Compares ways to wait for a copy of a GPU: what each adds to the time of the copy, and the
 * processor time of the process. The ways take turns in one run.
 *
 *     gcc -O2 device_waits.c -o device_waits -ldl && ./device_waits
 *
 * "spin"       asks an event until it is done
 * "driver"     cuEventSynchronize
 * "blocking"   cuEventSynchronize of an event with CU_EVENT_BLOCKING_SYNC
 * "callback"   sleeps on a futex word that a callback of the driver (cuLaunchHostFunc) writes
 * "sleep 50"   sleeps until 80 us before the median of "spin", with the system's timer slack (50 us), then spins
 * "sleep 1"    sleeps until 20 us before it, with a timer slack of 1 ns, then spins
 * "growing"    spins 30 us, then sleeps an eighth of the time waited, with a timer slack of 1 ns
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/futex.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef int Result;
typedef void *Handle;
typedef unsigned long long Address;

#define FUNCTIONS(F)                                                                                                   \
    F(init, "cuInit", (unsigned))                                                                                      \
    F(device_get, "cuDeviceGet", (int *, int))                                                                         \
    F(retain, "cuDevicePrimaryCtxRetain", (Handle *, int))                                                             \
    F(set_current, "cuCtxSetCurrent", (Handle))                                                                        \
    F(allocate, "cuMemAlloc_v2", (Address *, size_t))                                                                  \
    F(allocate_host, "cuMemHostAlloc", (void **, size_t, unsigned))                                                    \
    F(stream_create, "cuStreamCreate", (Handle *, unsigned))                                                           \
    F(copy, "cuMemcpyAsync", (Address, Address, size_t, Handle))                                                       \
    F(event_create, "cuEventCreate", (Handle *, unsigned))                                                             \
    F(event_record, "cuEventRecord", (Handle, Handle))                                                                 \
    F(event_query, "cuEventQuery", (Handle))                                                                           \
    F(event_synchronize, "cuEventSynchronize", (Handle))                                                               \
    F(host_function, "cuLaunchHostFunc", (Handle, void (*)(void *), void *))

#define DECLARE(name, symbol, parameters) static Result(*name) parameters;
FUNCTIONS(DECLARE)

static void check(Result result, const char *what) {
    if (result != 0) {
        fprintf(stderr, "device_waits: %s: CUDA error %d\n", what, result);
        exit(1);
    }
}

static double seconds(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static double now(void) { return seconds(CLOCK_MONOTONIC); }

static void sleep_until(double end) {
    struct timespec time = {(time_t)end, (long)(1e9 * (end - (double)(time_t)end))};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL) == EINTR) {
    }
}

static void set_slack(unsigned long nanoseconds) { prctl(PR_SET_TIMERSLACK, nanoseconds); }

static Handle stream, plain, blocking;
static uint32_t word;

static void on_completion(void *number) {
    __atomic_store_n(&word, (uint32_t)(uintptr_t)number, __ATOMIC_RELEASE);
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static void spin(void) {
    while (event_query(plain) != 0) {
    }
}

static void wait_spin(double begin, double expected) {
    (void)begin, (void)expected;
    check(event_record(plain, stream), "record");
    spin();
}

static void wait_driver(double begin, double expected) {
    (void)begin, (void)expected;
    check(event_record(plain, stream), "record");
    check(event_synchronize(plain), "synchronize");
}

static void wait_blocking(double begin, double expected) {
    (void)begin, (void)expected;
    check(event_record(blocking, stream), "record");
    check(event_synchronize(blocking), "synchronize");
}

static void wait_callback(double begin, double expected) {
    static uint32_t number;
    (void)begin, (void)expected;
    number++;
    check(host_function(stream, on_completion, (void *)(uintptr_t)number), "callback");
    for (;;) {
        uint32_t seen = __atomic_load_n(&word, __ATOMIC_ACQUIRE);
        if (seen == number) return;
        syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    }
}

static void wait_sleep(double begin, double expected, double margin, unsigned long slack) {
    check(event_record(plain, stream), "record");
    double wake = begin + expected - margin;
    if (wake > now()) {
        if (slack != 0) set_slack(slack);
        sleep_until(wake);
        if (slack != 0) set_slack(50000);
    }
    spin();
}

static void wait_sleep_50(double begin, double expected) { wait_sleep(begin, expected, 80e-6, 0); }
static void wait_sleep_1(double begin, double expected) { wait_sleep(begin, expected, 20e-6, 1); }

static void wait_growing(double begin, double expected) {
    (void)expected;
    check(event_record(plain, stream), "record");
    set_slack(1);
    while (event_query(plain) != 0) {
        double waited = now() - begin;
        if (waited > 30e-6) sleep_until(now() + waited / 8);
    }
    set_slack(50000);
}

static const struct {
    const char *name;
    void (*wait)(double, double);
} ways[] = {{"spin", wait_spin},         {"driver", wait_driver},     {"blocking", wait_blocking}, {"callback", wait_callback},
            {"sleep 50", wait_sleep_50}, {"sleep 1", wait_sleep_1}, {"growing", wait_growing}};
enum { WAYS = sizeof ways / sizeof *ways, ROUNDS = 101, SLEEPS = 200 };

static int compare(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static void measure(const char *kind, Address to, Address from, size_t length) {
    static double times[WAYS][ROUNDS];
    double used[WAYS] = {0}, expected = 0;
    for (int round = -5; round < ROUNDS; round++) {
        for (int way = 0; way < WAYS; way++) {
            double cpu = seconds(CLOCK_PROCESS_CPUTIME_ID), begin = now();
            check(copy(to, from, length, stream), "copy");
            ways[way].wait(begin, expected);
            double took = now() - begin;
            if (round < 0) {
                if (way == 0) expected = took;
                continue;
            }
            used[way] += seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
            times[way][round] = took;
            if (way == 0) {
                double sorted[ROUNDS];
                memcpy(sorted, times[0], sizeof(double) * (size_t)(round + 1));
                qsort(sorted, (size_t)round + 1, sizeof(double), compare);
                expected = sorted[round / 2];
            }
        }
    }
    for (int way = 0; way < WAYS; way++) {
        qsort(times[way], ROUNDS, sizeof(double), compare);
        double median = times[way][ROUNDS / 2], base = times[0][ROUNDS / 2];
        printf("%-6s %10zu  %-9s %9.1f %9.1f %+8.1f %8.1f %6.1f%%\n", kind, length, ways[way].name, 1e6 * median,
               1e6 * times[way][ROUNDS * 9 / 10], 1e6 * (median - base), 1e6 * used[way] / ROUNDS,
               100 * used[way] / ROUNDS / median);
    }
}

static void measure_sleeps(unsigned long slack) {
    static const double lengths[] = {20e-6, 100e-6, 1e-3};
    set_slack(slack);
    for (int at = 0; at < 3; at++) {
        double late[SLEEPS];
        for (int round = 0; round < SLEEPS; round++) {
            double end = now() + lengths[at];
            sleep_until(end);
            late[round] = now() - end;
        }
        qsort(late, SLEEPS, sizeof(double), compare);
        printf("sleep %6.0f us, timer slack %5lu ns: late by %6.1f us (median), %6.1f us (p90)\n", 1e6 * lengths[at],
               slack, 1e6 * late[SLEEPS / 2], 1e6 * late[SLEEPS * 9 / 10]);
    }
    set_slack(50000);
}

int main(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL) {
        fprintf(stderr, "device_waits: %s\n", dlerror());
        return 1;
    }
#define LOAD(name, symbol, parameters)                                                                                 \
    if ((*(void **)&name = dlsym(library, symbol)) == NULL) {                                                          \
        fprintf(stderr, "device_waits: no %s\n", symbol);                                                              \
        return 1;                                                                                                      \
    }
    FUNCTIONS(LOAD)
    const size_t longest = (size_t)1 << 32, longest_host = (size_t)1 << 28;
    int device;
    Handle context;
    Address from, to;
    void *host;
    check(init(0), "initialise");
    check(device_get(&device, 0), "device");
    check(retain(&context, device), "context");
    check(set_current(context), "context");
    check(allocate(&from, longest), "allocate");
    check(allocate(&to, longest), "allocate");
    check(allocate_host(&host, longest_host, 0), "allocate host memory");
    check(stream_create(&stream, 1), "stream");
    check(event_create(&plain, 2), "event");
    check(event_create(&blocking, 3), "event");

    measure_sleeps(50000);
    measure_sleeps(1);
    printf("%-6s %10s  %-9s %9s %9s %8s %8s %7s\n", "copy", "bytes", "wait", "median us", "p90 us", "added", "cpu us",
           "of core");
    for (size_t length = 1 << 12; length <= longest; length <<= length < (1 << 26) ? 7 : 2)
        measure("device", to, from, length);
    for (size_t length = 1 << 20; length <= longest_host; length <<= 4) measure("host", (Address)(uintptr_t)host, from, length);
    return 0;
}
