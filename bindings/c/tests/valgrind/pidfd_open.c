/*
 * Lets programs run under a valgrind that does not know pidfd_open (before 3.20).
 *
  * Preloaded, it replaces that system call: a helper process, which valgrind does not follow,
  * makes it, and sends the descriptor back. The helper is this file, too, compiled with -DHELPER;
  * its path is PIDFD_HELPER in the environment.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* Number of the helper's descriptor of the socket. */
#define PLACE 3

union control {
    struct cmsghdr aligned;
    char room[CMSG_SPACE(sizeof(int))];
};

static void describe(struct msghdr *message, struct iovec *part, char *byte, union control *control)
{
    memset(message, 0, sizeof *message);
    memset(control, 0, sizeof *control);
    part->iov_base = byte;
    part->iov_len = 1;
    message->msg_iov = part;
    message->msg_iovlen = 1;
    message->msg_control = control->room;
    message->msg_controllen = sizeof control->room;
}

#ifdef HELPER

int main(int count, char **arguments)
{
    struct msghdr message;
    struct iovec part;
    union control control;
    struct cmsghdr *header;
    char byte = 0;
    int file;

    if (count != 2)
        return 2;
    file = (int)syscall(SYS_pidfd_open, atoi(arguments[1]), 0);
    if (file < 0)
        return 1;
    describe(&message, &part, &byte, &control);
    header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof file);
    memcpy(CMSG_DATA(header), &file, sizeof file);
    return sendmsg(PLACE, &message, 0) == 1 ? 0 : 1;
}

#else

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>

static long open_by_helper(long process)
{
    const char *helper = getenv("PIDFD_HELPER");
    struct msghdr message;
    struct iovec part;
    union control control;
    struct cmsghdr *header;
    int sockets[2], file = -1;
    char byte, number[24];
    pid_t child;

    if (helper == NULL || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
        errno = ENOSYS;
        return -1;
    }
    snprintf(number, sizeof number, "%ld", process);
    child = fork();
    if (child == 0) {
        /* The helper makes the call itself. */
        unsetenv("LD_PRELOAD");
        /* Not close-on-exec there, unless it was there before. */
        if (sockets[1] == PLACE ? dup2(dup(PLACE), PLACE) : dup2(sockets[1], PLACE))
            execl(helper, helper, number, (char *)NULL);
        _exit(127);
    }
    close(sockets[1]);
    describe(&message, &part, &byte, &control);
    if (child > 0 && recvmsg(sockets[0], &message, MSG_CMSG_CLOEXEC) == 1) {
        header = CMSG_FIRSTHDR(&message);
        if (header != NULL && header->cmsg_type == SCM_RIGHTS)
            memcpy(&file, CMSG_DATA(header), sizeof file);
    }
    close(sockets[0]);
    while (child > 0 && waitpid(child, NULL, 0) < 0 && errno == EINTR)
        ;
    if (file < 0)
        errno = ESRCH;
    return file;
}

static long (*next)(long, ...);

/* Before the program has threads. */
static void __attribute__((constructor)) find_next(void)
{
    if (next == NULL)
        *(void **)&next = dlsym(RTLD_NEXT, "syscall");
}

long syscall(long number, ...)
{
    long arguments[6];
    va_list list;
    int at;

    va_start(list, number);
    for (at = 0; at < 6; at++)
        arguments[at] = va_arg(list, long);
    va_end(list);
    if (number == SYS_pidfd_open)
        return open_by_helper(arguments[0]);
    find_next();
    return next(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4],
                arguments[5]);
}

#endif
