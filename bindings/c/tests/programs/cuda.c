/*
  * The functions of rgaps.h with GPU memory, in two processes, if FABRICAST_DEVICE is a CUDA device.
  * The driver is loaded at run time, so that this compiles anywhere. Prints "skipped" and succeeds
  * without such a device.
 */
#include "driver.h"

#include <rgaps.h>

#define MESSAGES 20
#define LENGTH ((size_t)8 << 20)

/* A pointer to device memory, for a topic in host memory. */
static void push_to_the_host(device_pointer memory, unsigned char *bytes)
{
    char name[] = "cuda to host";
    rgaps_publisher_t *publisher;
    rgaps_subscriber_t *subscriber;
    const unsigned char *pulled;

    CHECK(setenv("FABRICAST_DEVICE", "host", 1) == 0);
    publisher = publisher_init(name);
    subscriber = subscriber_init(name);
    CHECK(publisher != NULL && subscriber != NULL);
    fill(bytes, LENGTH, MESSAGES);
    CHECK(cuda.to_device(memory, bytes, LENGTH) == 0);
    CHECK(publisher_push(publisher, LENGTH, (void *)(uintptr_t)memory) == 0);
    pulled = subscriber_pull(subscriber);
    CHECK(pulled != NULL);
    check_filled(pulled, LENGTH, MESSAGES);
    subscriber_destroy(subscriber);
    publisher_destroy(publisher);
}

static void publish(int in, int out)
{
    char name[] = "cuda";
    unsigned char *bytes = malloc(LENGTH);
    device_pointer memory;
    rgaps_publisher_t *publisher;
    uint64_t message;

    CHECK(bytes != NULL);
    open_device(number());
    CHECK(cuda.allocate(&memory, LENGTH) == 0);
    publisher = publisher_init(name);
    CHECK(publisher != NULL);
    signal_peer(out);
    await_signal(in);
    for (message = 0; message < MESSAGES; message++) {
        fill(bytes, LENGTH, message);
        CHECK(cuda.to_device(memory, bytes, LENGTH) == 0);
        /* Every other message from host memory: the kind of pointer is detected. */
        CHECK(publisher_push(publisher, LENGTH,
                             message % 2 == 0 ? (void *)(uintptr_t)memory : bytes) == 0);
    }
    /* Beyond the allocation; an unmapped address. */
    CHECK(publisher_push(publisher, LENGTH + 1, (void *)(uintptr_t)(memory + LENGTH - 1)) < 0);
    CHECK(publisher_push(publisher, LENGTH, (void *)(uintptr_t)4096) < 0);
    push_to_the_host(memory, bytes);
    await_signal(in);
    publisher_destroy(publisher);
    CHECK(cuda.release(memory) == 0);
    free(bytes);
}

int main(void)
{
    char name[] = "cuda";
    unsigned char *bytes;
    rgaps_subscriber_t *subscriber;
    uint64_t message;
    int in, out;
    pid_t child;

    if (number() < 0) {
        puts("cuda: skipped: FABRICAST_DEVICE names no CUDA device");
        return 0;
    }
    bytes = malloc(LENGTH);
    CHECK(bytes != NULL);
    alarm(300);
    /* Before the driver is used: it does not survive a fork. */
    child = start(publish, &in, &out);
    open_device(number());
    await_signal(in);
    subscriber = subscriber_init(name);
    CHECK(subscriber != NULL);
    signal_peer(out);
    for (message = 0; message < MESSAGES; message++) {
        void *pulled = subscriber_pull(subscriber);
        unsigned kind = 0;

        CHECK(pulled != NULL);
        /* CU_POINTER_ATTRIBUTE_MEMORY_TYPE is CU_MEMORYTYPE_DEVICE. */
        CHECK(cuda.attribute(&kind, 2, (device_pointer)(uintptr_t)pulled) == 0 && kind == 2);
        CHECK(cuda.to_host(bytes, (device_pointer)(uintptr_t)pulled, LENGTH) == 0);
        check_filled(bytes, LENGTH, message);
    }
    signal_peer(out);
    finish(child);
    subscriber_destroy(subscriber);
    CHECK(fabricast_open_handles() == 0);
    free(bytes);
    puts("cuda: ok");
    return 0;
}
