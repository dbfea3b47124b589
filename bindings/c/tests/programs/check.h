/* Common code of the test programs. */
#ifndef CHECK_H
#define CHECK_H

#include <fabricast.h>

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

/* Only a failing test waits so long. */
#define LONG FABRICAST_SECONDS(60)

#define CHECK(condition)                                                                      \
    do {                                                                                      \
        if (!(condition)) {                                                                   \
            fprintf(stderr, "%s:%d: failed: %s\n    last error: %s\n", __FILE__, __LINE__,    \
                    #condition, fabricast_error_message());                                   \
            exit(1);                                                                          \
        }                                                                                     \
    } while (0)

#define DONE(call) EXPECT(FABRICAST_OK, call)

#define EXPECT(expected, call)                                                                \
    do {                                                                                      \
        fabricast_status status_ = (call);                                                    \
        if (status_ != (expected)) {                                                          \
            fprintf(stderr, "%s:%d: %s is \"%s\", not \"%s\"\n    last error: %s\n",          \
                    __FILE__, __LINE__, #call, fabricast_status_name(status_),                \
                    fabricast_status_name(expected), fabricast_error_message());              \
            exit(1);                                                                          \
        }                                                                                     \
    } while (0)

/* Two processes synchronize with bytes in pipes. */
static inline void signal_peer(int to)
{
    char byte = 0;
    CHECK(write(to, &byte, 1) == 1);
}

static inline void await_signal(int from)
{
    char byte;
    CHECK(read(from, &byte, 1) == 1);
}

/* Runs a function in a child process, which has not used the library, with a pipe from it and one
 * to it. */
static inline pid_t start(void (*run)(int in, int out), int *in, int *out)
{
    int down[2], up[2];
    pid_t child;

    CHECK(pipe(down) == 0 && pipe(up) == 0);
    fflush(NULL);
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(300);
        close(down[1]);
        close(up[0]);
        run(down[0], up[1]);
        CHECK(fabricast_open_handles() == 0);
        exit(0);
    }
    close(down[0]);
    close(up[1]);
    *in = up[0];
    *out = down[1];
    return child;
}

static inline void finish(pid_t child)
{
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* The expected value of every byte of a message. */
static inline unsigned char pattern(uint64_t message, size_t at)
{
    return (unsigned char)(message * 31 + at * 7 + (at >> 8));
}

static inline void fill(unsigned char *bytes, size_t length, uint64_t message)
{
    size_t at;
    for (at = 0; at < length; at++)
        bytes[at] = pattern(message, at);
}

static inline void check_filled(const unsigned char *bytes, size_t length, uint64_t message)
{
    size_t at;
    for (at = 0; at < length; at++)
        CHECK(bytes[at] == pattern(message, at));
}

static inline fabricast_node *join(void)
{
    fabricast_node_options options;
    fabricast_node *node;

    DONE(fabricast_node_options_init(&options, sizeof options));
    options.label = "test";
    options.service_timeout = FABRICAST_SECONDS(60);
    options.waiting = FABRICAST_WAITING_BLOCK;
    DONE(fabricast_node_join(&options, &node));
    return node;
}

static inline fabricast_topic *topic(fabricast_node *node, const char *name, uint64_t largest,
                                     uint32_t depth)
{
    fabricast_topic_settings settings;
    fabricast_topic *opened;

    DONE(fabricast_topic_settings_init(&settings, sizeof settings));
    settings.largest = largest;
    settings.depth = depth;
    settings.release_deadline = FABRICAST_SECONDS(120);
    DONE(fabricast_topic_open(node, name, &settings, &opened));
    return opened;
}

#endif
