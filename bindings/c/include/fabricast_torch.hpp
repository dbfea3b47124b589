/*
 * fabricast_torch.hpp - tensors of PyTorch in several processes without a copy, for C++17 programs
 * with libtorch. What is sent is a token of about 100 bytes; it is also that of the module
 * fabricast.torch in Python. Link with -lfabricast, and with libtorch.
 *
 *     fabricast::torch::send(tensor, socket);                  // Python: fabricast.torch.recv(socket)
 *
 *     at::Tensor tensor = fabricast::torch::recv(socket);      // Python: fabricast.torch.send(..., socket)
 *     tensor = fabricast::torch::load(message);                // of a token that came by other means
 *
 * - A CUDA tensor is sent in place, as far as its allocator allows. The calls wait for the current
 *   stream of its device; other streams that write it are synchronized by the program before.
 * - A tensor of the host that is not in memory of `empty` is copied once, into such memory.
 * - The sender keeps the memory until it was loaded once, and until the receiver does not use it any
 *   more. The end of the last reference to a received CUDA tensor waits for the current stream of its
 *   device, so it must not be captured; the program synchronizes other streams that use the tensor.
 * - A child of a fork loads and sends by itself; it does not use what its parent received.
 *
 * Functions throw Error, or c10::Error if PyTorch fails.
 */
#ifndef FABRICAST_TORCH_HPP
#define FABRICAST_TORCH_HPP

#include <fabricast.h>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include <poll.h>
#include <sys/socket.h>
#include <sys/types.h>

namespace fabricast {
namespace torch {

/* Why a call failed. */
class Error : public std::runtime_error {
public:
    Error(fabricast_status status, const std::string &message)
        : std::runtime_error(message), status_(status) {}

    fabricast_status status() const noexcept { return status_; }

private:
    fabricast_status status_;
};

using Timeout = std::chrono::nanoseconds;
/* Below 0: without a timeout. */
constexpr Timeout default_timeout = std::chrono::seconds(30);

at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions &options = {});

namespace detail {

inline void check(fabricast_status status) {
    if (status != FABRICAST_OK) throw Error(status, fabricast_error_message());
}

[[noreturn]] inline void fail(fabricast_status status, const char *operation, const std::string &cause) {
    throw Error(status, std::string(operation) + " failed: " + cause);
}

constexpr const char *sending = "send tensor", *receiving = "receive tensor";

[[noreturn]] inline void malformed(const std::string &cause) { fail(FABRICAST_E_MALFORMED, receiving, cause); }

struct Close {
    // Memory for which closing does not wait.
    void operator()(fabricast_memory *memory) const noexcept { fabricast_memory_close(memory, FABRICAST_NOW); }
    void operator()(fabricast_share *share) const noexcept { fabricast_share_close(share); }
    void operator()(fabricast_opened *opened) const noexcept { fabricast_opened_close(opened); }
};
using Memory = std::unique_ptr<fabricast_memory, Close>;
using Share = std::unique_ptr<fabricast_share, Close>;
using Opened = std::unique_ptr<fabricast_opened, Close>;

/* ------------------------------------------------------------------ types, messages */

/* Types by their codes in messages, which are never reused, with their codes of DLPack. The types
 * from Bool on are sent as integers of their size, as by PyTorch for Python. */
struct Type {
    const char *name;
    uint8_t code;
};
constexpr Type types[] = {
    {"Byte", 1}, {"Char", 0}, {"Short", 0}, {"Int", 0}, {"Long", 0}, {"Half", 2}, {"Float", 2}, {"Double", 2},
    {"ComplexFloat", 5}, {"ComplexDouble", 5}, {"Bool", 0}, {"BFloat16", 0}, {"UInt16", 0}, {"UInt32", 0},
    {"UInt64", 0}, {"ComplexHalf", 0}, {"Float8_e4m3fn", 0}, {"Float8_e5m2", 0}, {"Float8_e4m3fnuz", 0},
    {"Float8_e5m2fnuz", 0}, {"Float8_e8m0fnu", 0}, {"Float4_e2m1fn_x2", 0},
};
constexpr size_t type_count = sizeof types / sizeof *types;

inline size_t type_number(at::ScalarType type) {
    const char *name = c10::toString(type);
    for (size_t number = 0; number < type_count; number++)
        if (std::strcmp(types[number].name, name) == 0) return number;
    fail(FABRICAST_E_INVALID_ARGUMENT, sending, std::string("elements of ") + name + " are not sent");
}

inline at::ScalarType type_of(size_t number) {
    if (number < type_count) {
        for (int at = 0; at < static_cast<int>(at::ScalarType::NumOptions); at++) {
            const auto type = static_cast<at::ScalarType>(at);
            if (std::strcmp(types[number].name, c10::toString(type)) == 0) return type;
        }
    }
    malformed("this version of PyTorch has not the type of its elements");
}

constexpr uint8_t requires_grad = 1, is_conjugated = 2, is_negated = 4, is_empty = 16;
constexpr char magic[] = {'F', 'T', 1};
/* Magic, flags, type, dimensions, and device (2 bytes), before the token. */
constexpr size_t header_length = 8;
constexpr size_t longest_message = 4096;

inline void put_number(std::string &message, uint64_t number, size_t bytes) {
    for (size_t at = 0; at < bytes; at++) message.push_back(static_cast<char>(number >> (8 * at)));
}

inline uint64_t number_at(std::string_view message, size_t start, size_t bytes) {
    uint64_t number = 0;
    for (size_t at = 0; at < bytes; at++)
        number |= static_cast<uint64_t>(static_cast<unsigned char>(message[start + at])) << (8 * at);
    return number;
}

/* ------------------------------------------------------------------ memory */

/* Waits for the current stream of a device. */
inline void synchronize(at::Device device) {
    if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
}

/* What a tensor has in place of an allocator's block. */
template <typename Handle> struct Block {
    Handle handle;
    at::Device device;

    /* The deleter of the tensor. */
    static void end(void *block) noexcept {
        std::unique_ptr<Block> ended(static_cast<Block *>(block));
        try {
            synchronize(ended->device);
        } catch (...) {
            // The device has failed, or is ending with the process.
        }
    }
};

/* The block of a tensor, if it has one of this kind. */
template <typename Handle> Block<Handle> *block_of(const at::Tensor &tensor) {
    const at::DataPtr &data = tensor.storage().data_ptr();
    if (data.get_deleter() != &Block<Handle>::end) return nullptr;
    return static_cast<Block<Handle> *>(data.get_context());
}

template <typename Handle>
at::Tensor tensor_of(void *start, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type,
                     at::Device device, Handle handle) {
    auto *block = new Block<Handle>{std::move(handle), device};
    return at::for_blob(start, sizes)
        .strides(strides)
        .context(block, &Block<Handle>::end)
        .options(at::TensorOptions().dtype(type).device(device))
        .target_device(device)
        .make_tensor();
}

inline at::Device device_of(const std::string &location) {
    if (location == "host") return at::Device(at::kCPU);
    if (location.compare(0, 5, "cuda:") != 0)
        fail(FABRICAST_E_INVALID_ARGUMENT, receiving, "PyTorch has no device " + location);
    return at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(std::atoi(location.c_str() + 5)));
}

inline std::string location_of(at::Device device) {
    return device.is_cpu() ? "host" : "cuda:" + std::to_string(static_cast<int>(device.index()));
}

/* The callback of adopted memory. */
inline void drop(void *tensor) noexcept {
    auto *kept = static_cast<at::Tensor *>(tensor);
    // The last reference may close handles, or need locks of the program: not in the callback.
    try {
        std::thread([kept] { delete kept; }).detach();
    } catch (const std::system_error &) {
        // No thread: it is never freed.
    }
}

/* The range of memory that a CUDA tensor covers, kept by the tensor. */
inline Memory adopt(const at::Tensor &tensor) {
    int64_t last = 0;
    for (int64_t at = 0; at < tensor.dim(); at++) last += (tensor.size(at) - 1) * tensor.stride(at);
    const size_t length = static_cast<size_t>(last + 1) * tensor.element_size();
    auto kept = std::make_unique<at::Tensor>(tensor);
    fabricast_memory *memory;
    check(fabricast_memory_adopt_with_release(tensor.data_ptr(), length, drop, kept.get(), &memory));
    kept.release();
    return Memory(memory);
}

inline Share share(const at::Tensor &tensor, size_t type, const std::string &directory) {
    Memory adopted;
    fabricast_memory *memory;
    at::Tensor source = tensor;
    uint64_t offset = 0;
    auto *block = block_of<Memory>(source);
    if (block == nullptr && source.is_cuda()) {
        adopted = adopt(source);
        memory = adopted.get();
    } else {
        if (block == nullptr) {
            source = empty(tensor.sizes(), tensor.options());
            source.copy_(tensor);
            block = block_of<Memory>(source);
        }
        void *start;
        size_t length;
        memory = block->handle.get();
        check(fabricast_memory_address(memory, &start, &length));
        offset = static_cast<uint64_t>(static_cast<char *>(source.data_ptr()) - static_cast<char *>(start));
    }
    synchronize(source.device());

    const std::vector<uint64_t> shape(source.sizes().begin(), source.sizes().end());
    fabricast_tensor described;
    check(fabricast_tensor_init(&described, sizeof described));
    described.type_code = types[type].code;
    described.bits = static_cast<uint8_t>(8 * source.element_size());
    described.dimensions = static_cast<uint32_t>(shape.size());
    described.shape = shape.data();
    described.strides = source.strides().data();
    described.byte_offset = offset;
    fabricast_share *shared;
    check(fabricast_memory_share(memory, &described, 0, directory.empty() ? nullptr : directory.c_str(), &shared));
    return Share(shared);
}

/* ------------------------------------------------------------------ opening */

inline at::Tensor load_empty(std::string_view body, size_t dimensions, at::ScalarType type, int device) {
    if (body.size() != 16 * dimensions) malformed("its shape is truncated");
    std::vector<int64_t> numbers(2 * dimensions);
    bool has_elements = true;
    for (size_t at = 0; at < numbers.size(); at++) {
        numbers[at] = static_cast<int64_t>(number_at(body, 8 * at, 8));
        if (numbers[at] < 0) malformed("an empty tensor has elements");
        if (at < dimensions && numbers[at] == 0) has_elements = false;
    }
    if (has_elements) malformed("an empty tensor has elements");
    at::Device place(at::kCPU);
    if (device >= 0) {
        const int count = c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount();
        place = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(std::min(device, count - 1)));
    }
    const at::IntArrayRef all(numbers);
    const auto options = at::TensorOptions().dtype(type).device(place);
    return at::empty_strided(all.slice(0, dimensions), all.slice(dimensions), options);
}

inline at::Tensor load_shared(std::string_view token, size_t type, int device, Timeout timeout,
                              const std::string &directory) {
    const at::ScalarType scalar = type_of(type);
    std::string user;
    if (device >= 0) user = location_of(c10::impl::VirtualGuardImpl(at::kCUDA).getDevice());
    fabricast_opened *handle;
    check(fabricast_shared_memory_open(token.data(), token.size(), directory.empty() ? nullptr : directory.c_str(),
                                       user.empty() ? nullptr : user.c_str(), timeout.count(), &handle));
    Opened opened(handle);
    fabricast_tensor tensor;
    check(fabricast_opened_tensor(handle, &tensor, sizeof tensor));
    const char *location;
    check(fabricast_opened_location(handle, &location));
    uint64_t is_read_only;
    check(fabricast_opened_is_read_only(handle, &is_read_only));
    if (is_read_only != 0)
        fail(FABRICAST_E_DENIED, receiving, "it is shared for readers only, and a tensor can be written");
    if (tensor.type_code != types[type].code || tensor.bits != 8 * c10::elementSize(scalar) || tensor.lanes != 1)
        malformed("its elements are of another type than the memory's");

    std::vector<int64_t> sizes, strides;
    int64_t count = 1;
    for (uint32_t at = 0; at < tensor.dimensions; at++) {
        // A product of 64 bits, as PyTorch computes it.
        if (tensor.shape[at] == 0 || __builtin_mul_overflow(count, tensor.shape[at], &count) || tensor.strides[at] < 0)
            malformed("PyTorch has no such shape and strides");
        sizes.push_back(static_cast<int64_t>(tensor.shape[at]));
        strides.push_back(tensor.strides[at]);
    }
    void *start;
    size_t length;
    check(fabricast_opened_address(handle, &start, &length));
    void *first = static_cast<char *>(start) + tensor.byte_offset;
    return tensor_of(first, sizes, strides, scalar, device_of(location), std::move(opened));
}

/* ------------------------------------------------------------------ sockets */

/* Waits until a socket is ready. */
inline void wait_for(int socket, short events, Timeout timeout, std::chrono::steady_clock::time_point begin,
                     const char *operation) {
    for (;;) {
        int milliseconds = -1;
        if (timeout >= Timeout::zero()) {
            const auto left = timeout - (std::chrono::steady_clock::now() - begin);
            const auto whole = std::chrono::duration_cast<std::chrono::milliseconds>(left).count() + 1;
            milliseconds = static_cast<int>(std::max<int64_t>(0, std::min<int64_t>(whole, 1 << 30)));
            if (left < Timeout::zero()) milliseconds = 0;
        }
        pollfd one = {socket, events, 0};
        const int ready = ::poll(&one, 1, milliseconds);
        if (ready > 0) return;
        if (ready < 0 && errno != EINTR) fail(FABRICAST_E_FAILED, operation, std::strerror(errno));
        if (ready == 0 && milliseconds < 1 << 30)
            fail(FABRICAST_E_DEADLINE_EXCEEDED, operation, "the socket was not ready within the timeout");
    }
}

inline std::string receive_exactly(int socket, size_t length, Timeout timeout,
                                   std::chrono::steady_clock::time_point begin) {
    std::string received(length, '\0');
    for (size_t at = 0; at < length;) {
        wait_for(socket, POLLIN, timeout, begin, receiving);
        const ssize_t got = ::recv(socket, &received[at], length - at, 0);
        if (got > 0) at += static_cast<size_t>(got);
        if (got == 0) fail(FABRICAST_E_CLOSED, receiving, "the other process has closed the socket");
        if (got < 0 && errno != EINTR && errno != EAGAIN)
            fail(FABRICAST_E_FAILED, receiving, std::strerror(errno));
    }
    return received;
}

inline void send_all(int socket, const std::string &bytes) {
    for (size_t at = 0; at < bytes.size();) {
        const ssize_t put = ::send(socket, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
        if (put >= 0)
            at += static_cast<size_t>(put);
        else if (errno == EAGAIN)
            wait_for(socket, POLLOUT, Timeout(-1), {}, sending);
        else if (errno != EINTR)
            fail(errno == EPIPE ? FABRICAST_E_CLOSED : FABRICAST_E_FAILED, sending, std::strerror(errno));
    }
}

} // namespace detail

/*
 * A tensor of zeros in memory that other processes map, of the host or of a CUDA device: sent
 * without a copy.
 */
inline at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions &options) {
    const at::ScalarType type = at::typeMetaToScalarType(options.dtype());
    at::Device device = options.device();
    if (device.is_cuda() && !device.has_index()) device = c10::impl::VirtualGuardImpl(at::kCUDA).getDevice();
    if (!device.is_cpu() && !device.is_cuda())
        detail::fail(FABRICAST_E_INVALID_ARGUMENT, "allocate tensor", "no memory is shared of " + device.str());
    // Without gaps; a length of 0 counts as 1.
    std::vector<int64_t> strides(sizes.size());
    int64_t length = 1;
    for (size_t at = sizes.size(); at > 0; at--) {
        strides[at - 1] = length;
        if (sizes[at - 1] < 0 || __builtin_mul_overflow(length, std::max<int64_t>(1, sizes[at - 1]), &length))
            detail::fail(FABRICAST_E_INVALID_ARGUMENT, "allocate tensor", "no memory has its shape");
    }
    if (__builtin_mul_overflow(length, static_cast<int64_t>(c10::elementSize(type)), &length))
        detail::fail(FABRICAST_E_INVALID_ARGUMENT, "allocate tensor", "no memory has its shape");
    fabricast_memory *memory;
    detail::check(fabricast_memory_allocate(detail::location_of(device).c_str(), static_cast<size_t>(length), &memory));
    detail::Memory kept(memory);
    void *start;
    size_t whole;
    detail::check(fabricast_memory_address(memory, &start, &whole));
    at::Tensor tensor = detail::tensor_of(start, sizes, strides, type, device, std::move(kept));
    return tensor.requires_grad_(options.requires_grad());
}

namespace detail {

/* The message of a tensor, and the share of its memory; none of an empty tensor. */
inline std::pair<std::string, Share> message_of(const at::Tensor &tensor, const std::string &directory) {
    if (tensor.layout() != at::kStrided || tensor.is_quantized())
        fail(FABRICAST_E_INVALID_ARGUMENT, sending, "it has no strides: send its parts");
    if (!tensor.is_cuda() && !tensor.device().is_cpu())
        fail(FABRICAST_E_INVALID_ARGUMENT, sending,
             "it is on " + tensor.device().str() + ", which is neither the host nor a CUDA device");
    if (tensor.requires_grad() && !tensor.is_leaf())
        fail(FABRICAST_E_INVALID_ARGUMENT, sending,
             "it is no leaf and requires gradients, which end at the process. Send tensor.detach()");
    uint8_t flags = tensor.requires_grad() ? requires_grad : 0;
    at::Tensor bare = tensor.detach();
    if (bare.is_conj()) {
        flags |= is_conjugated;
        bare = bare.conj();
    }
    if (bare.is_neg()) {
        flags |= is_negated;
        bare = bare._neg_view();
    }
    if (bare.dim() > FABRICAST_MAX_DIMENSIONS)
        fail(FABRICAST_E_INVALID_ARGUMENT, sending,
             "it has " + std::to_string(bare.dim()) + " dimensions, 16 is the maximum");
    if (bare.numel() == 0) flags |= is_empty;
    const size_t type = type_number(bare.scalar_type());
    std::string message(magic, sizeof magic);
    put_number(message, flags, 1);
    put_number(message, type, 1);
    put_number(message, static_cast<uint64_t>(bare.dim()), 1);
    put_number(message, static_cast<uint64_t>(bare.is_cuda() ? bare.get_device() : -1), 2);
    if (bare.numel() == 0) {
        for (const int64_t number : bare.sizes()) put_number(message, static_cast<uint64_t>(number), 8);
        for (const int64_t number : bare.strides()) put_number(message, static_cast<uint64_t>(number), 8);
        return {message, Share()};
    }
    Share shared = share(bare, type, directory);
    check(fabricast_share_limit_to_one(shared.get()));
    char bytes[FABRICAST_MAX_TOKEN];
    size_t length;
    check(fabricast_share_token(shared.get(), bytes, sizeof bytes, &length));
    return {message.append(bytes, length), std::move(shared)};
}

/* Without it the share ends with its handle. */
inline void leave_to_receiver(Share &shared) {
    if (!shared) return;
    char bytes[FABRICAST_MAX_TOKEN];
    size_t length;
    check(fabricast_share_for_one_receiver(shared.get(), bytes, sizeof bytes, &length));
    shared.release();
}

} // namespace detail

/*
 * Bytes by which one other process loads the tensor, to be sent by any means. An empty directory
 * means the default, as for fabricast_memory_share.
 */
inline std::string token(const at::Tensor &tensor, const std::string &directory = {}) {
    auto [message, shared] = detail::message_of(tensor, directory);
    detail::leave_to_receiver(shared);
    return message;
}

/*
 * The tensor of a token of another process, on the device where its memory is. A parameter of Python
 * is a tensor that requires gradients.
 */
inline at::Tensor load(std::string_view message, Timeout timeout = default_timeout,
                       const std::string &directory = {}) {
    const std::string_view magic(detail::magic, sizeof detail::magic);
    if (message.size() < detail::header_length || message.substr(0, magic.size()) != magic)
        detail::malformed("the message is none of a tensor");
    const uint64_t flags = detail::number_at(message, 3, 1), type = detail::number_at(message, 4, 1);
    const uint64_t dimensions = detail::number_at(message, 5, 1);
    const int device = static_cast<int16_t>(detail::number_at(message, 6, 2));
    const std::string_view body = message.substr(detail::header_length);
    at::Tensor tensor = (flags & detail::is_empty) != 0
                            ? detail::load_empty(body, dimensions, detail::type_of(type), device)
                            : detail::load_shared(body, type, device, timeout, directory);
    if ((flags & detail::is_negated) != 0) tensor = tensor._neg_view();
    if ((flags & detail::is_conjugated) != 0) tensor = tensor.conj();
    return tensor.requires_grad_((flags & detail::requires_grad) != 0);
}

/* Sends a tensor to a connected stream socket: both processes then have a tensor in the same memory. */
inline void send(const at::Tensor &tensor, int socket, const std::string &directory = {}) {
    auto [message, shared] = detail::message_of(tensor, directory);
    std::string bytes;
    detail::put_number(bytes, message.size(), 4);
    detail::send_all(socket, bytes + message);
    detail::leave_to_receiver(shared);
}

/* Receives a tensor that `send` sent, or fabricast.torch.send of Python to a socket. The timeout is
 * that of the message, and again that of the memory. */
inline at::Tensor recv(int socket, Timeout timeout = default_timeout, const std::string &directory = {}) {
    const auto begin = std::chrono::steady_clock::now();
    const uint64_t length = detail::number_at(detail::receive_exactly(socket, 4, timeout, begin), 0, 4);
    if (length > detail::longest_message) detail::malformed("a message of " + std::to_string(length) + " bytes");
    return load(detail::receive_exactly(socket, static_cast<size_t>(length), timeout, begin), timeout, directory);
}

} // namespace torch
} // namespace fabricast

#endif
