/* The functions of rgaps.h between two nodes, configured by the environment alone. */
#include "check.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <rgaps.h>
#include <sys/socket.h>

#define MESSAGES 50
#define LENGTH 100000

/* A free port of the loopback address. */
static int free_port(void)
{
    struct sockaddr_in address;
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);

    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(listener >= 0 && bind(listener, (struct sockaddr *)&address, sizeof address) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&address, &length) == 0);
    close(listener);
    return ntohs(address.sin_port);
}

static void be_node(const char *name, const char *variable, int port)
{
    char text[4096];

    CHECK(getenv("FABRICAST_DIRECTORY") != NULL);
    snprintf(text, sizeof text, "%s/%s", getenv("FABRICAST_DIRECTORY"), name);
    CHECK(setenv("FABRICAST_DIRECTORY", text, 1) == 0);
    snprintf(text, sizeof text, "127.0.0.1:%d", port);
    CHECK(setenv(variable, text, 1) == 0);
    CHECK(setenv("FABRICAST_INSECURE", "true", 1) == 0);
}

static void publish(int in, int out)
{
    char name[] = "nodes";
    static unsigned char bytes[LENGTH];
    rgaps_publisher_t *publisher;
    uint64_t message;
    int port;

    CHECK(read(in, &port, sizeof port) == sizeof port);
    be_node("one", "FABRICAST_PEERS", port);
    publisher = publisher_init(name);
    CHECK(publisher != NULL);
    /* Until the other node is connected, messages have no subscriber: send these. */
    for (message = 0;; message++) {
        int status;
        fill(bytes, LENGTH, message);
        memcpy(bytes, &message, sizeof message);
        CHECK(publisher_push(publisher, LENGTH, bytes) == 0);
        /* Enough of them were received. */
        status = fcntl(in, F_SETFL, O_NONBLOCK);
        CHECK(status == 0);
        if (read(in, &status, 1) == 1)
            break;
        usleep(5000);
    }
    publisher_destroy(publisher);
    signal_peer(out);
}

int main(void)
{
    char name[] = "nodes";
    rgaps_subscriber_t *subscriber;
    uint64_t first = 0, at;
    int in, out, port = free_port();
    pid_t child;

    alarm(300);
    child = start(publish, &in, &out);
    be_node("two", "FABRICAST_LISTEN", port);
    subscriber = subscriber_init(name);
    CHECK(subscriber != NULL);
    CHECK(write(out, &port, sizeof port) == sizeof port);
    for (at = 0; at < MESSAGES; at++) {
        const unsigned char *bytes = subscriber_pull(subscriber);
        uint64_t message;
        size_t byte;

        CHECK(bytes != NULL);
        memcpy(&message, bytes, sizeof message);
        if (at == 0)
            first = message;
        CHECK(message == first + at);
        for (byte = sizeof message; byte < LENGTH; byte++)
            CHECK(bytes[byte] == pattern(message, byte));
    }
    signal_peer(out);
    subscriber_destroy(subscriber);
    await_signal(in);
    finish(child);
    CHECK(fabricast_open_handles() == 0);
    puts("nodes: ok");
    return 0;
}
