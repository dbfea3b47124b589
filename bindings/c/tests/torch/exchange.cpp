/*
 * exchange SOCKET [cuda]
 *
 * Exchanges tensors with exchange.py by fabricast_torch.hpp: a byte that it receives says what is
 * to be done. Ends with 0 after 'q'.
 */
#include <fabricast_torch.hpp>

#include <cstdio>

#include <unistd.h>

namespace ft = fabricast::torch;

#define EXPECT(condition)                                                                    \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);     \
            std::exit(1);                                                                    \
        }                                                                                    \
    } while (0)

template <typename Call> fabricast_status status_of(Call &&call) {
    try {
        call();
    } catch (const ft::Error &error) {
        EXPECT(std::strstr(error.what(), " failed: ") != nullptr);
        return error.status();
    }
    return FABRICAST_OK;
}

static at::Tensor counted(at::Device device) {
    return at::arange(32, at::TensorOptions().dtype(at::kFloat).device(device)).view({4, 8});
}

/* Views like the cases of exchange.py. */
static std::vector<at::Tensor> views_of(const at::Tensor &whole) {
    return {
        whole,
        whole.slice(0, 1, 3),
        whole.slice(1, 1, 7, 2),
        whole.t(),
        whole.slice(0, 0, 1).expand({3, 8}),
        whole.select(0, 2).select(0, 3),
        whole.slice(0, 0, 0),
        whole.slice(1, 8),
    };
}

static void fail_as_documented(at::Device device) {
    const at::Tensor plain = at::ones({3}, at::TensorOptions().dtype(at::kFloat).device(device));
    at::Tensor leaf = plain.clone().requires_grad_(true);
    EXPECT(status_of([&] { ft::token(leaf * 2); }) == FABRICAST_E_INVALID_ARGUMENT);
    EXPECT(status_of([&] { ft::token(at::eye(3).to_sparse()); }) == FABRICAST_E_INVALID_ARGUMENT);
    EXPECT(status_of([&] { ft::token(at::empty({3}, at::TensorOptions().device(at::kMeta))); }) ==
          FABRICAST_E_INVALID_ARGUMENT);
    EXPECT(status_of([&] { ft::token(at::ones(std::vector<int64_t>(17, 1))); }) == FABRICAST_E_INVALID_ARGUMENT);
    EXPECT(status_of([&] { ft::empty({3}, at::TensorOptions().device(at::kMeta)); }) == FABRICAST_E_INVALID_ARGUMENT);
    for (const std::vector<int64_t> &sizes : {std::vector<int64_t>{-1}, {INT64_MAX, 8}, {INT64_MAX / 2, 0}})
        EXPECT(status_of([&] { ft::empty(sizes, at::kDouble); }) == FABRICAST_E_INVALID_ARGUMENT);
    EXPECT(status_of([&] { ft::token(plain, "/proc/none"); }) != FABRICAST_OK);

    const std::string empty = ft::token(plain.slice(0, 0, 0)), token = ft::token(plain);
    EXPECT(ft::load(empty).numel() == 0);
    for (const std::string &wrong : {std::string(), std::string("FT\1"), std::string("XY\1\0\6\1\0\0", 8), empty + "x",
                                     empty.substr(0, 20), token.substr(0, 40), token + "x"})
        EXPECT(status_of([&] { ft::load(wrong); }) == FABRICAST_E_MALFORMED);
    // A type of another size, one of no PyTorch, a shape with elements, and a negative stride.
    std::string wrong = token;
    for (const char type : {char(7), char(100)}) {
        wrong[4] = type;
        const at::Tensor again = plain.clone();
        EXPECT(status_of([&] { ft::load(wrong); }) == FABRICAST_E_MALFORMED);
        wrong = ft::token(again);
    }
    wrong = empty;
    wrong[8] = 1;
    EXPECT(status_of([&] { ft::load(wrong); }) == FABRICAST_E_MALFORMED);
    wrong = empty;
    wrong[23] = char(0x80);
    EXPECT(status_of([&] { ft::load(wrong); }) == FABRICAST_E_MALFORMED);

    int pair[2];
    EXPECT(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    EXPECT(status_of([&] { ft::recv(pair[0], std::chrono::milliseconds(20)); }) == FABRICAST_E_DEADLINE_EXCEEDED);
    EXPECT(::send(pair[1], "\xff\xff\xff\xff", 4, 0) == 4);
    EXPECT(status_of([&] { ft::recv(pair[0]); }) == FABRICAST_E_MALFORMED);
    close(pair[1]);
    EXPECT(status_of([&] { ft::recv(pair[0]); }) == FABRICAST_E_CLOSED);
    EXPECT(status_of([&] { ft::send(plain, pair[0]); }) == FABRICAST_E_CLOSED);
    close(pair[0]);
}

/* In one process; memory from cudaMalloc is opened in other processes only. */
static void exchange_with_itself() {
    at::Tensor whole = ft::empty({4, 8}, at::kFloat);
    EXPECT(whole.sum().item<float>() == 0 && whole.is_contiguous());
    whole.copy_(counted(at::kCPU));
    for (const at::Tensor &view : views_of(whole)) {
        const std::string token = ft::token(view);
        at::Tensor loaded = ft::load(token);
        EXPECT(loaded.sizes() == view.sizes() && at::equal(loaded, view));
        if (view.numel() > 0) {
            EXPECT(loaded.strides() == view.strides());
            EXPECT(status_of([&] { ft::load(token); }) == FABRICAST_E_NOT_FOUND);
        }
    }
    // The same memory, also after the first tensor is gone.
    at::Tensor loaded = ft::load(ft::token(whole.select(0, 1)));
    whole[1][2] = 77;
    EXPECT(loaded[2].item<float>() == 77);
    whole.reset();
    EXPECT(loaded[2].item<float>() == 77);
    // A copy.
    const at::Tensor plain = counted(at::kCPU);
    loaded = ft::load(ft::token(plain.t()));
    EXPECT(at::equal(loaded, plain.t()) && loaded.is_contiguous());
    loaded.zero_();
    EXPECT(plain.sum().item<float>() != 0);
    EXPECT(ft::empty({2, 2}, at::TensorOptions().dtype(at::kHalf).requires_grad(true)).requires_grad());
    EXPECT(ft::empty({0, 3}).numel() == 0 && ft::empty({}).dim() == 0);
}

int main(int count, char **arguments) {
    EXPECT(count >= 2);
    const int socket = std::atoi(arguments[1]);
    const at::Device device = count > 2 ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
    alarm(300);
    for (;;) {
        char command = 'q';
        EXPECT(read(socket, &command, 1) == 1);
        switch (command) {
        case 'e': { // back as it is, or as a copy
            const at::Tensor tensor = ft::recv(socket);
            ft::send(tensor.is_cuda() ? tensor.detach().clone().requires_grad_(tensor.requires_grad()) : tensor,
                     socket);
            break;
        }
        case 'm': { // back in memory of `empty`
            const at::Tensor tensor = ft::recv(socket);
            at::Tensor copy = ft::empty(tensor.sizes(), tensor.options());
            copy.copy_(tensor.detach());
            ft::send(copy, socket);
            break;
        }
        case 'w': { // written in place
            at::Tensor tensor = ft::recv(socket);
            tensor.mul_(3);
            if (tensor.is_cuda()) ft::detail::synchronize(tensor.device());
            tensor.reset();
            EXPECT(write(socket, "w", 1) == 1);
            break;
        }
        case 'v': // views of plain memory, and of memory of `empty`
            for (const bool is_own : {false, true}) {
                at::Tensor whole = counted(device);
                if (is_own) {
                    whole = ft::empty({4, 8}, at::TensorOptions().dtype(at::kFloat).device(device));
                    whole.copy_(counted(device));
                }
                for (const at::Tensor &view : views_of(whole)) ft::send(view, socket);
            }
            break;
        case 'k': { // written by the other process
            at::Tensor own = ft::empty({16}, at::TensorOptions().dtype(at::kInt).device(device));
            ft::send(own, socket);
            EXPECT(read(socket, &command, 1) == 1);
            EXPECT(own.sum().item<int64_t>() == 16 * 5);
            break;
        }
        case 's':
            exchange_with_itself();
            fail_as_documented(device);
            break;
        case 'q':
            EXPECT(fabricast_open_handles() == 0);
            std::puts("exchange: ok");
            return 0;
        default:
            EXPECT(!"a known command");
        }
    }
}
