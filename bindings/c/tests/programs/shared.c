/*
 * Memory that is shared by a token and opened in another process: of the host, and of an emulated
 * device or of the CUDA device in FABRICAST_DEVICE. Memory that the program left to the library.
 * Owners that close, and owners that are killed.
 */
#include "agents.h"
#include "driver.h"

#include <sys/stat.h>

#define LENGTH ((size_t)1 << 20)
#define OFFSET 4096

static const char *device(void)
{
    return number() >= 0 ? getenv("FABRICAST_DEVICE") : "emulated:0";
}

/* The memory that processes share now. */
static const char *location;

static int is_cuda(const char *where)
{
    return strncmp(where, "cuda:", 5) == 0;
}

static void put(void *address, const char *where, uint64_t message)
{
    unsigned char *bytes = malloc(LENGTH);

    CHECK(bytes != NULL);
    fill(bytes, LENGTH, message);
    if (is_cuda(where))
        CHECK(cuda.to_device((device_pointer)(uintptr_t)address, bytes, LENGTH) == 0);
    else
        memcpy(address, bytes, LENGTH);
    free(bytes);
}

static void check(const void *address, const char *where, uint64_t message)
{
    unsigned char *bytes = malloc(LENGTH);

    CHECK(bytes != NULL);
    if (is_cuda(where))
        CHECK(cuda.to_host(bytes, (device_pointer)(uintptr_t)address, LENGTH) == 0);
    else
        memcpy(bytes, address, LENGTH);
    check_filled(bytes, LENGTH, message);
    free(bytes);
}

static struct bytes token_of(fabricast_share *share)
{
    struct bytes token;

    DONE(fabricast_share_token(share, NULL, 0, &token.length));
    CHECK(token.length > 32 && token.length <= FABRICAST_MAX_TOKEN);
    EXPECT(FABRICAST_E_TOO_LONG,
           fabricast_share_token(share, token.bytes, token.length - 1, &token.length));
    DONE(fabricast_share_token(share, token.bytes, sizeof token.bytes, &token.length));
    return token;
}

static fabricast_opened *open_token(const struct bytes *token)
{
    fabricast_opened *opened;
    DONE(fabricast_shared_memory_open(token->bytes, token->length, NULL, NULL, LONG, &opened));
    return opened;
}

/* A matrix whose rows are in reverse order. */
static const uint64_t shape[2] = {64, 32};
static const int64_t strides[2] = {-32, 1};

static fabricast_tensor matrix(void)
{
    fabricast_tensor tensor;

    DONE(fabricast_tensor_init(&tensor, sizeof tensor));
    CHECK(tensor.size == sizeof tensor && tensor.type_code == 1 && tensor.bits == 8);
    CHECK(tensor.lanes == 1 && tensor.dimensions == 0 && tensor.shape == NULL);
    tensor.type_code = 2;
    tensor.bits = 32;
    tensor.dimensions = 2;
    tensor.shape = shape;
    tensor.strides = strides;
    tensor.byte_offset = OFFSET + 63 * 32 * 4;
    return tensor;
}

static void own(int in, int out)
{
    fabricast_memory *memory = allocate(location, LENGTH);
    fabricast_tensor tensor = matrix();
    fabricast_share *share;
    struct bytes token;

    write_pattern(memory, LENGTH, 1);
    DONE(fabricast_memory_share(memory, &tensor, 0, NULL, &share));
    token = token_of(share);
    send_bytes(out, token.bytes, token.length);
    await_signal(in);
    check_pattern(memory, 0, LENGTH, 2);
    DONE(fabricast_share_close(share));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_share_close(share));
    /* For readers, and all bytes. */
    DONE(fabricast_memory_share(memory, NULL, 1, NULL, &share));
    token = token_of(share);
    send_bytes(out, token.bytes, token.length);
    await_signal(in);
    DONE(fabricast_share_close(share));
    close_memory(memory);
    signal_peer(out);
    await_signal(in);
}

static void use(int in, int out)
{
    fabricast_opened *opened, *again, *whole;
    fabricast_tensor tensor;
    const char *where;
    uint64_t is_read_only;
    struct bytes token;
    void *address, *other;
    size_t length;

    if (number() >= 0)
        open_device(number());
    token = receive_bytes(in);
    opened = open_token(&token);
    DONE(fabricast_opened_location(opened, &where));
    CHECK(strcmp(where, location) == 0);
    DONE(fabricast_opened_is_read_only(opened, &is_read_only));
    CHECK(is_read_only == 0);
    memset(&tensor, 0xff, sizeof tensor);
    DONE(fabricast_opened_tensor(opened, &tensor, sizeof tensor));
    CHECK(tensor.size == sizeof tensor && tensor.type_code == 2 && tensor.bits == 32);
    CHECK(tensor.lanes == 1 && tensor.dimensions == 2);
    CHECK(memcmp(tensor.shape, shape, sizeof shape) == 0);
    CHECK(memcmp(tensor.strides, strides, sizeof strides) == 0);
    CHECK(tensor.byte_offset == OFFSET + 63 * 32 * 4);
    DONE(fabricast_opened_address(opened, &address, &length));
    CHECK(length >= LENGTH);
    check(address, where, 1);
    /* Mapped once. */
    DONE(fabricast_shared_memory_open(token.bytes, token.length, NULL, "host", FABRICAST_FOREVER,
                                      &again));
    DONE(fabricast_opened_address(again, &other, &length));
    CHECK(other == address);
    DONE(fabricast_opened_close(again));
    put(address, where, 2);
    signal_peer(out);

    token = receive_bytes(in);
    whole = open_token(&token);
    DONE(fabricast_opened_is_read_only(whole, &is_read_only));
    CHECK(is_read_only == 1);
    DONE(fabricast_opened_tensor(whole, &tensor, sizeof tensor));
    CHECK(tensor.type_code == 1 && tensor.bits == 8 && tensor.dimensions == 1);
    CHECK(tensor.shape[0] >= LENGTH && tensor.strides[0] == 1 && tensor.byte_offset == 0);
    DONE(fabricast_opened_address(whole, &other, &length));
    CHECK(length == tensor.shape[0]);
    check(other, where, 2);
    signal_peer(out);
    await_signal(in);
    /* The owner has closed both, and has not ended. What is open here is opened again. */
    DONE(fabricast_shared_memory_open(token.bytes, token.length, NULL, NULL, LONG, &again));
    DONE(fabricast_opened_close(again));
    put(address, where, 3);
    check(other, where, 3);
    DONE(fabricast_opened_close(whole));
    /* Nothing is shared any more. */
    EXPECT(FABRICAST_E_NOT_FOUND,
           fabricast_shared_memory_open(token.bytes, token.length, NULL, NULL, LONG, &again));
    CHECK(again == NULL);
    signal_peer(out);
    DONE(fabricast_opened_close(opened));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_opened_close(opened));
    DONE(fabricast_opened_close(NULL));
    DONE(fabricast_share_close(NULL));
}

/* Left to one receiver. */
static void leave(int in, int out)
{
    fabricast_memory *memory = allocate("host", LENGTH);
    fabricast_share *share;
    struct bytes token, left;

    write_pattern(memory, LENGTH, 5);
    DONE(fabricast_memory_share(memory, NULL, 0, NULL, &share));
    token = token_of(share);
    /* Nothing changes. */
    EXPECT(FABRICAST_E_TOO_LONG, fabricast_share_for_one_receiver(share, left.bytes, 10,
                                                                  &left.length));
    CHECK(left.length == 0);
    DONE(fabricast_share_for_one_receiver(share, NULL, 0, &left.length));
    CHECK(left.length == token.length);
    DONE(fabricast_share_for_one_receiver(share, left.bytes, sizeof left.bytes, &left.length));
    CHECK(left.length == token.length && memcmp(left.bytes, token.bytes, left.length) == 0);
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_share_close(share));
    close_memory(memory);
    send_bytes(out, left.bytes, left.length);
    await_signal(in);
}

static void use_once(int in, int out)
{
    struct bytes token = receive_bytes(in);
    fabricast_opened *opened = open_token(&token), *again;
    void *address;
    size_t length;

    DONE(fabricast_opened_address(opened, &address, &length));
    check(address, "host", 5);
    EXPECT(FABRICAST_E_NOT_FOUND,
           fabricast_shared_memory_open(token.bytes, token.length, NULL, NULL, LONG, &again));
    DONE(fabricast_opened_close(opened));
    signal_peer(out);
}

/* Killed while its memory is used. */
static void vanish(int in, int out)
{
    fabricast_memory *memory = allocate("host", LENGTH);
    fabricast_share *share;
    struct bytes token;

    (void)in;
    write_pattern(memory, LENGTH, 6);
    DONE(fabricast_memory_share(memory, NULL, 0, NULL, &share));
    token = token_of(share);
    send_bytes(out, token.bytes, token.length);
    for (;;)
        pause();
}

static void survive(pid_t child, int in)
{
    struct bytes token = receive_bytes(in);
    fabricast_opened *opened = open_token(&token), *again;
    void *address;
    size_t length;
    int code;

    DONE(fabricast_opened_address(opened, &address, &length));
    CHECK(kill(child, SIGKILL) == 0);
    CHECK(waitpid(child, &code, 0) == child && WIFSIGNALED(code));
    /* It is still open here. */
    DONE(fabricast_shared_memory_open(token.bytes, token.length, NULL, NULL, LONG, &again));
    check(address, "host", 6);
    DONE(fabricast_opened_close(again));
    DONE(fabricast_opened_close(opened));
    EXPECT(FABRICAST_E_CLOSED,
           fabricast_shared_memory_open(token.bytes, token.length, NULL, NULL, LONG, &again));
    SAYS("has ended");
}

static int releases;

static void released(void *user_data)
{
    char bytes[8];
    size_t length;

    CHECK(user_data == &releases);
    /* Other threads may hold locks: refused. */
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_share_token(NULL, bytes, 8, &length));
    __atomic_add_fetch(&releases, 1, __ATOMIC_SEQ_CST);
}

static int release_count(void)
{
    return __atomic_load_n(&releases, __ATOMIC_SEQ_CST);
}

static void release_of_host_memory(void)
{
    unsigned char *bytes = calloc(1, LENGTH);
    fabricast_memory *memory;
    fabricast_share *share;

    CHECK(bytes != NULL);
    /* What was not adopted is not released. */
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_memory_adopt_with_release(bytes, 0, released, &releases, &memory));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_memory_adopt_with_release(NULL, 8, released, &releases, &memory));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_memory_adopt_with_release(bytes, LENGTH, NULL, &releases, &memory));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_memory_adopt_with_release(bytes, LENGTH, released, &releases, NULL));
    CHECK(release_count() == 0);

    DONE(fabricast_memory_adopt_with_release(bytes, LENGTH, released, &releases, &memory));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_memory_share(memory, NULL, 0, NULL, &share));
    SAYS("fabricast_memory_allocate");
    DONE(fabricast_memory_write(memory, 0, "some bytes", 10));
    CHECK(release_count() == 0 && memcmp(bytes, "some bytes", 10) == 0);
    close_memory(memory);
    CHECK(release_count() == 1);
    free(bytes);
    releases = 0;
}

/* A part of other memory of a device. */
static void release_of_shared_memory(int in, int out)
{
    fabricast_memory *whole = allocate(device(), 2 * LENGTH), *part;
    fabricast_share *share;
    struct bytes token;
    void *address;
    size_t length;

    release_of_host_memory();
    DONE(fabricast_memory_address(whole, &address, &length));
    DONE(fabricast_memory_adopt_with_release((char *)address + OFFSET, LENGTH, released, &releases,
                                             &part));
    write_pattern(part, LENGTH, 7);
    DONE(fabricast_memory_share(part, NULL, 0, NULL, &share));
    token = token_of(share);
    send_bytes(out, token.bytes, token.length);
    await_signal(in);
    DONE(fabricast_share_close(share));
    DONE(fabricast_memory_close(part, FABRICAST_NOW));
    /* The receiver uses it. */
    usleep(200000);
    CHECK(release_count() == 0);
    signal_peer(out);
    while (release_count() == 0)
        usleep(1000);

    /* With memory for which closing waits. */
    DONE(fabricast_memory_adopt((char *)address + OFFSET, LENGTH, &part));
    DONE(fabricast_memory_share(part, NULL, 0, NULL, &share));
    token = token_of(share);
    send_bytes(out, token.bytes, token.length);
    await_signal(in);
    DONE(fabricast_share_close(share));
    EXPECT(FABRICAST_E_WOULD_BLOCK, fabricast_memory_close(part, FABRICAST_NOW));
    signal_peer(out);
    close_memory(part);
    CHECK(release_count() == 1);
    close_memory(whole);
}

static void use_until_released(int in, int out)
{
    int round;

    for (round = 0; round < 2; round++) {
        struct bytes token = receive_bytes(in);
        fabricast_opened *opened = open_token(&token);
        fabricast_tensor tensor;
        const char *where;
        void *address;
        size_t length;

        DONE(fabricast_opened_tensor(opened, &tensor, sizeof tensor));
        CHECK(tensor.shape[0] == LENGTH);
        DONE(fabricast_opened_address(opened, &address, &length));
        DONE(fabricast_opened_location(opened, &where));
        signal_peer(out);
        await_signal(in);
        check((char *)address + tensor.byte_offset, where, 7);
        DONE(fabricast_opened_close(opened));
    }
}

static void refuse(fabricast_memory *memory, const fabricast_tensor *tensor)
{
    fabricast_share *share = (fabricast_share *)(uintptr_t)7;
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_memory_share(memory, tensor, 0, NULL, &share));
    CHECK(share == NULL);
}

static void invalid_tensors(fabricast_memory *memory)
{
    static const uint64_t ones[17] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    static const uint64_t huge[2] = {UINT64_MAX, UINT64_MAX};
    static const int64_t far[2] = {INT64_MIN, INT64_MAX};
    fabricast_tensor valid = matrix(), tensor;
    fabricast_share *share;

#define REFUSED(change) (tensor = valid, change, refuse(memory, &tensor))
    REFUSED(tensor.size = 8);
    REFUSED(tensor.type_code = 18);
    REFUSED(tensor.bits = 0);
    REFUSED(tensor.bits = 200);
    REFUSED(tensor.lanes = 0);
    REFUSED(tensor.shape = NULL);
    REFUSED(tensor.dimensions = 17);
    REFUSED((tensor.dimensions = 17, tensor.shape = ones, tensor.strides = NULL));
    REFUSED(tensor.dimensions = UINT32_MAX);
    /* Beyond the end, before the beginning, and more than any memory. */
    REFUSED(tensor.byte_offset = LENGTH);
    REFUSED(tensor.byte_offset = 0);
    REFUSED(tensor.byte_offset = UINT64_MAX);
    REFUSED(tensor.shape = huge);
    REFUSED((tensor.shape = huge, tensor.strides = NULL));
    REFUSED(tensor.strides = far);
    DONE(fabricast_memory_share(memory, &valid, 0, NULL, &share));
    DONE(fabricast_share_close(share));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_memory_share(memory, NULL, 2, NULL, &share));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_memory_share(memory, NULL, 0, NULL, NULL));
    EXPECT(FABRICAST_E_FAILED, fabricast_memory_share(memory, NULL, 0, "/proc/none", &share));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_tensor_init(NULL, sizeof tensor));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_tensor_init(&tensor, 8));
}

static void invalid_tokens(const struct bytes *token)
{
    struct bytes wrong;
    fabricast_opened *opened = (fabricast_opened *)(uintptr_t)7;

    EXPECT(FABRICAST_E_MALFORMED, fabricast_shared_memory_open(NULL, 0, NULL, NULL, LONG, &opened));
    CHECK(opened == NULL);
    EXPECT(FABRICAST_E_MALFORMED,
           fabricast_shared_memory_open("no token", 8, NULL, NULL, LONG, &opened));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_shared_memory_open(NULL, 8, NULL, NULL, LONG, &opened));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_shared_memory_open(token->bytes, token->length, NULL, NULL, LONG, NULL));
    EXPECT(FABRICAST_E_MALFORMED,
           fabricast_shared_memory_open(token->bytes, token->length - 1, NULL, NULL, LONG, &opened));
    wrong = *token;
    wrong.bytes[wrong.length / 2] ^= 1;
    EXPECT(FABRICAST_E_MALFORMED,
           fabricast_shared_memory_open(wrong.bytes, wrong.length, NULL, NULL, LONG, &opened));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_shared_memory_open(token->bytes, token->length, NULL, "moon", LONG, &opened));
}

static void misuse(void)
{
    fabricast_memory *memory = allocate("host", LENGTH);
    fabricast_share *share, *none;
    fabricast_opened *opened;
    fabricast_tensor tensor;
    const char *where;
    struct bytes token;
    uint64_t flag;
    void *address;
    size_t length;

    invalid_tensors(memory);
    DONE(fabricast_memory_share(memory, NULL, 0, NULL, &share));
    token = token_of(share);
    invalid_tokens(&token);
    opened = open_token(&token);
    /* Handles of other kinds, and none. */
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_memory_share(NULL, NULL, 0, NULL, &none));
    CHECK(none == NULL);
    EXPECT(FABRICAST_E_BAD_HANDLE,
           fabricast_share_token((fabricast_share *)opened, NULL, 0, &length));
    EXPECT(FABRICAST_E_BAD_HANDLE,
           fabricast_share_for_one_receiver((fabricast_share *)memory, NULL, 0, &length));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_opened_close((fabricast_opened *)share));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_opened_address(NULL, &address, &length));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_opened_location(NULL, &where));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_opened_is_read_only(NULL, &flag));
    memset(&tensor, 0xff, sizeof tensor);
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_opened_tensor(NULL, &tensor, sizeof tensor));
    CHECK(tensor.size == 0 && tensor.shape == NULL);
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_opened_tensor(opened, &tensor, 8));
    DONE(fabricast_opened_close(opened));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_opened_address(opened, &address, &length));
    DONE(fabricast_share_close(share));
    close_memory(memory);
}

/* Opens what another user shares. */
static void intrude(int in, int out)
{
    struct bytes token;
    fabricast_opened *opened;

    (void)out;
    token = receive_bytes(in);
    CHECK(setgid(65534) == 0 && setuid(65534) == 0);
    EXPECT(FABRICAST_E_DENIED, fabricast_shared_memory_open(token.bytes, token.length, NULL, NULL,
                                                            LONG, &opened));
    /* Sanitizers cannot examine such a process at its end. */
    _exit(0);
}

static void refuse_other_users(pid_t child, int out)
{
    fabricast_memory *memory = allocate("host", LENGTH);
    fabricast_share *share;
    struct bytes token;

    CHECK(chmod(getenv("FABRICAST_DIRECTORY"), 0755) == 0);
    DONE(fabricast_memory_share(memory, NULL, 0, NULL, &share));
    token = token_of(share);
    send_bytes(out, token.bytes, token.length);
    finish(child);
    DONE(fabricast_share_close(share));
    close_memory(memory);
}

int main(void)
{
    void (*const owners[])(int, int) = {own, own, leave, release_of_shared_memory, vanish, intrude};
    void (*const users[])(int, int) = {use, use, use_once, use_until_released};
    enum { USERS = sizeof users / sizeof *users, ALL = sizeof owners / sizeof *owners };
    const char *locations[USERS] = {"host", device(), "host", "host"};
    const int is_root = geteuid() == 0;
    pid_t children[ALL];
    int in[ALL], out[ALL], at;

    alarm(300);
    /* Before a driver is used, which does not survive a fork. */
    for (at = 0; at < ALL - !is_root; at++) {
        location = locations[at < USERS ? at : 0];
        children[at] = start(owners[at], &in[at], &out[at]);
    }
    for (at = 0; at < USERS; at++) {
        location = locations[at];
        users[at](in[at], out[at]);
        finish(children[at]);
    }
    survive(children[USERS], in[USERS]);
    misuse();
    if (is_root)
        refuse_other_users(children[USERS + 1], out[USERS + 1]);
    CHECK(fabricast_open_handles() == 0);
    puts("shared: ok");
    return 0;
}
