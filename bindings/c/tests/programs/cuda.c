/*
 * The six functions on GPU memory, in two processes: where FABRICAST_DEVICE is a CUDA device.
 * The driver is loaded at run time, so that this is compiled anywhere. Says "skipped" and
 * succeeds where there is no such device.
 */
#include "driver.h"

#include <rgaps.h>

#define MESSAGES 20
#define LENGTH ((size_t)8 << 20)

/* A pointer to a device's memory, for a topic whose messages lie on the host. */
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
    tell(out);
    hear(in);
    for (message = 0; message < MESSAGES; message++) {
        fill(bytes, LENGTH, message);
        CHECK(cuda.to_device(memory, bytes, LENGTH) == 0);
        /* Every other one from plain memory of the host: where a pointer lies is found out. */
        CHECK(publisher_push(publisher, LENGTH,
                             message % 2 == 0 ? (void *)(uintptr_t)memory : bytes) == 0);
    }
    /* More than there is; an address of nobody's. */
    CHECK(publisher_push(publisher, LENGTH + 1, (void *)(uintptr_t)(memory + LENGTH - 1)) < 0);
    CHECK(publisher_push(publisher, LENGTH, (void *)(uintptr_t)4096) < 0);
    push_to_the_host(memory, bytes);
    hear(in);
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
    /* Before anybody touches the driver: it does not survive a fork. */
    child = start(publish, &in, &out);
    open_device(number());
    hear(in);
    subscriber = subscriber_init(name);
    CHECK(subscriber != NULL);
    tell(out);
    for (message = 0; message < MESSAGES; message++) {
        void *pulled = subscriber_pull(subscriber);
        unsigned kind = 0;

        CHECK(pulled != NULL);
        /* CU_POINTER_ATTRIBUTE_MEMORY_TYPE is CU_MEMORYTYPE_DEVICE. */
        CHECK(cuda.attribute(&kind, 2, (device_pointer)(uintptr_t)pulled) == 0 && kind == 2);
        CHECK(cuda.to_host(bytes, (device_pointer)(uintptr_t)pulled, LENGTH) == 0);
        check_filled(bytes, LENGTH, message);
    }
    tell(out);
    finish(child);
    subscriber_destroy(subscriber);
    CHECK(fabricast_open_handles() == 0);
    free(bytes);
    puts("cuda: ok");
    return 0;
}
