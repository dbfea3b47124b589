/*
 * fabricast_collective.hpp - collective operations, and parameters that all ranks agree on, for C++17.
 * Classes over the functions of fabricast.h, which documents them. Link with -lfabricast.
 *
 *     using namespace fabricast::collective;
 *     Domain domain = Domain::join_launched();                  // of mpirun, srun or torchrun
 *     std::vector<double> sums(count);
 *     domain.all_reduce(sums.data(), sums.size());              // in place
 *
 *     Options options;
 *     options->first_alpha = 900;
 *     ShmParamStore store(ranks, rank, options);
 *     Entry entry = store.enter(Operation::AllGather, bytes);   // the same on all ranks
 *     ... entry.parameters.alpha thousandths of the bytes on the fast path ...
 *     store.record(entry, stat);
 *
 * Objects are moved, not copied, and used by one thread at a time. A destructor leaves at once; `close`
 * waits for the other ranks. Functions throw Error.
 */
#ifndef FABRICAST_COLLECTIVE_HPP
#define FABRICAST_COLLECTIVE_HPP

#include <fabricast.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fabricast {
namespace collective {

/* Why a call failed, and the ranks that caused it. */
class Error : public std::runtime_error {
public:
    Error(fabricast_status status, const std::string &message, std::vector<uint32_t> ranks = {})
        : std::runtime_error(message), status_(status), ranks_(std::move(ranks)) {}

    fabricast_status status() const noexcept { return status_; }
    /* Empty if they are not known. */
    const std::vector<uint32_t> &ranks() const noexcept { return ranks_; }

private:
    fabricast_status status_;
    std::vector<uint32_t> ranks_;
};

using Timeout = std::chrono::nanoseconds;
/* Below 0: without a timeout. */
constexpr Timeout default_timeout = std::chrono::seconds(30);

enum class Type : uint32_t {
    U8 = FABRICAST_TYPE_U8,
    I8 = FABRICAST_TYPE_I8,
    U16 = FABRICAST_TYPE_U16,
    I16 = FABRICAST_TYPE_I16,
    U32 = FABRICAST_TYPE_U32,
    I32 = FABRICAST_TYPE_I32,
    U64 = FABRICAST_TYPE_U64,
    I64 = FABRICAST_TYPE_I64,
    F16 = FABRICAST_TYPE_F16,
    Bf16 = FABRICAST_TYPE_BF16,
    F32 = FABRICAST_TYPE_F32,
    F64 = FABRICAST_TYPE_F64
};

enum class Reduce : uint32_t {
    Sum = FABRICAST_REDUCE_SUM,
    Product = FABRICAST_REDUCE_PRODUCT,
    Min = FABRICAST_REDUCE_MIN,
    Max = FABRICAST_REDUCE_MAX,
    Mean = FABRICAST_REDUCE_MEAN
};

enum class Operation : uint32_t {
    AllReduce = FABRICAST_OPERATION_ALL_REDUCE,
    AllGather = FABRICAST_OPERATION_ALL_GATHER,
    ReduceScatter = FABRICAST_OPERATION_REDUCE_SCATTER,
    Broadcast = FABRICAST_OPERATION_BROADCAST,
    AllToAll = FABRICAST_OPERATION_ALL_TO_ALL,
    Gather = FABRICAST_OPERATION_GATHER,
    Scatter = FABRICAST_OPERATION_SCATTER,
    Reduce = FABRICAST_OPERATION_REDUCE,
    Barrier = FABRICAST_OPERATION_BARRIER
};

using Entry = fabricast_param_entry;
using ExecStat = fabricast_exec_stat;
using Parameters = fabricast_parameters;

namespace detail {

inline void check(fabricast_status status) {
    if (status == FABRICAST_OK) return;
    const std::string message = fabricast_error_message();
    std::vector<uint32_t> ranks(fabricast_error_ranks(nullptr, 0));
    fabricast_error_ranks(ranks.data(), ranks.size());
    throw Error(status, message, std::move(ranks));
}

struct Close {
    void operator()(fabricast_domain *domain) const noexcept { fabricast_domain_close(domain, FABRICAST_NOW); }
    void operator()(fabricast_param_store *store) const noexcept { fabricast_param_store_leave(store); }
};

template <typename T> struct TypeOf;
template <> struct TypeOf<uint8_t> { static constexpr Type value = Type::U8; };
template <> struct TypeOf<int8_t> { static constexpr Type value = Type::I8; };
template <> struct TypeOf<uint16_t> { static constexpr Type value = Type::U16; };
template <> struct TypeOf<int16_t> { static constexpr Type value = Type::I16; };
template <> struct TypeOf<uint32_t> { static constexpr Type value = Type::U32; };
template <> struct TypeOf<int32_t> { static constexpr Type value = Type::I32; };
template <> struct TypeOf<uint64_t> { static constexpr Type value = Type::U64; };
template <> struct TypeOf<int64_t> { static constexpr Type value = Type::I64; };
template <> struct TypeOf<float> { static constexpr Type value = Type::F32; };
template <> struct TypeOf<double> { static constexpr Type value = Type::F64; };

template <typename T> constexpr uint32_t type_of() { return static_cast<uint32_t>(TypeOf<T>::value); }

inline uint32_t number(Reduce op) { return static_cast<uint32_t>(op); }

} // namespace detail

/* Options of domains and stores, with the defaults: options->window = 3. */
class Options {
public:
    Options() { detail::check(fabricast_domain_options_init(&options_, sizeof options_)); }

    fabricast_domain_options *operator->() noexcept { return &options_; }
    const fabricast_domain_options *get() const noexcept { return &options_; }

private:
    fabricast_domain_options options_;
};

/* The ranks that carry out collective operations together, as one of them sees them. Elements of other
 * types are moved as bytes. */
class Domain {
public:
    static Domain join(uint32_t world_size, uint32_t rank, const Options &options = {}) {
        fabricast_domain *domain = nullptr;
        detail::check(fabricast_domain_join(world_size, rank, options.get(), &domain));
        return Domain(domain);
    }

    static Domain join_launched(const Options &options = {}) {
        fabricast_domain *domain = nullptr;
        detail::check(fabricast_domain_join_launched(options.get(), &domain));
        return Domain(domain);
    }

    uint32_t rank() const {
        uint32_t rank = 0;
        detail::check(fabricast_domain_rank(domain_.get(), &rank));
        return rank;
    }

    uint32_t size() const {
        uint32_t size = 0;
        detail::check(fabricast_domain_size(domain_.get(), &size));
        return size;
    }

    fabricast_domain *get() const noexcept { return domain_.get(); }

    /* The parameters of an operation of so many bytes in the last one: the same on all ranks. */
    Parameters parameters(Operation operation, uint64_t bytes, Type type = Type::U8) const {
        Parameters parameters;
        detail::check(fabricast_domain_parameters(domain_.get(), static_cast<uint32_t>(operation), bytes,
                                                  static_cast<uint32_t>(type), &parameters));
        return parameters;
    }

    /* Stops or continues learning: see fabricast_domain_freeze. */
    void freeze(bool is_frozen = true) {
        detail::check(fabricast_domain_freeze(domain_.get(), is_frozen ? 1 : 0));
    }

    /* The parameters as JSON. `topology` names the machines. */
    std::string save(const std::string &topology = {}) const {
        char *text = nullptr;
        detail::check(fabricast_domain_save(domain_.get(), topology.c_str(), &text));
        std::unique_ptr<char, fabricast_status (*)(char *)> owner(text, fabricast_text_free);
        return text;
    }

    /* Uses saved parameters from now on: see fabricast_domain_load. */
    void load(std::string_view json, const std::string &topology = {}) {
        detail::check(fabricast_domain_load(domain_.get(), topology.c_str(), json.data(), json.size()));
    }

    /* Leaves when all ranks have called it. */
    void close(Timeout timeout = default_timeout) {
        detail::check(fabricast_domain_close(domain_.release(), timeout.count()));
    }

    void barrier(Timeout timeout = default_timeout) {
        detail::check(fabricast_domain_barrier(domain_.get(), timeout.count()));
    }

    template <typename T>
    void all_reduce(T *elements, size_t count, Reduce op = Reduce::Sum, Timeout timeout = default_timeout) {
        detail::check(fabricast_domain_all_reduce(domain_.get(), nullptr, elements, count, detail::type_of<T>(),
                                                  detail::number(op), timeout.count()));
    }

    /* Other elements than those of the root stay. */
    template <typename T>
    void reduce(T *elements, size_t count, uint32_t root = 0, Reduce op = Reduce::Sum,
                Timeout timeout = default_timeout) {
        detail::check(fabricast_domain_reduce(domain_.get(), nullptr, elements, count, detail::type_of<T>(),
                                              detail::number(op), root, timeout.count()));
    }

    template <typename T>
    void broadcast(T *elements, size_t count, uint32_t root = 0, Timeout timeout = default_timeout) {
        detail::check(fabricast_domain_broadcast(domain_.get(), elements, count, detail::type_of<T>(), root,
                                                 timeout.count()));
    }

    /* `count` elements of each rank. */
    template <typename T>
    void all_gather(const T *own, T *all, size_t count, Timeout timeout = default_timeout) {
        detail::check(fabricast_domain_all_gather(domain_.get(), own, all, count, detail::type_of<T>(),
                                                  timeout.count()));
    }

    /* A block of `count` elements for each rank. */
    template <typename T>
    void reduce_scatter(const T *blocks, T *own, size_t count, Reduce op = Reduce::Sum,
                        Timeout timeout = default_timeout) {
        detail::check(fabricast_domain_reduce_scatter(domain_.get(), blocks, own, count, detail::type_of<T>(),
                                                      detail::number(op), timeout.count()));
    }

    template <typename T>
    void all_to_all(const T *send, T *receive, size_t count, Timeout timeout = default_timeout) {
        detail::check(fabricast_domain_all_to_all(domain_.get(), send, receive, count, detail::type_of<T>(),
                                                  timeout.count()));
    }

    /* `all` is used at the root only. */
    template <typename T>
    void gather(const T *own, T *all, size_t count, uint32_t root = 0, Timeout timeout = default_timeout) {
        detail::check(fabricast_domain_gather(domain_.get(), own, all, count, detail::type_of<T>(), root,
                                              timeout.count()));
    }

    /* `blocks` is used at the root only. */
    template <typename T>
    void scatter(const T *blocks, T *own, size_t count, uint32_t root = 0, Timeout timeout = default_timeout) {
        detail::check(fabricast_domain_scatter(domain_.get(), blocks, own, count, detail::type_of<T>(), root,
                                               timeout.count()));
    }

private:
    explicit Domain(fabricast_domain *domain) : domain_(domain) {}

    std::unique_ptr<fabricast_domain, detail::Close> domain_;
};

/* Parameters of collective operations that the program carries out itself, in shared memory. */
class ShmParamStore {
public:
    /* Attaches to the store of a job of world_size processes; waits until all have come. */
    ShmParamStore(uint32_t world_size, uint32_t rank, const Options &options = {}) {
        fabricast_param_store *store = nullptr;
        detail::check(fabricast_param_store_attach(world_size, rank, options.get(), &store));
        store_.reset(store);
    }

    /* Enters the next operation: the same number and parameters on all ranks. */
    Entry enter(Operation operation, uint64_t bytes, Type type = Type::U8, Timeout timeout = default_timeout) {
        Entry entry;
        detail::check(fabricast_param_store_enter(store_.get(), static_cast<uint32_t>(operation), bytes,
                                                  static_cast<uint32_t>(type), timeout.count(), &entry));
        return entry;
    }

    /* Records how the operation went on this rank. */
    void record(const Entry &entry, const ExecStat &stat) {
        detail::check(fabricast_param_store_record(store_.get(), &entry, &stat));
    }

    /* The parameters in the operation that was entered last. */
    Parameters parameters(Operation operation, uint64_t bytes, Type type = Type::U8) const {
        Parameters parameters;
        detail::check(fabricast_param_store_parameters(store_.get(), static_cast<uint32_t>(operation), bytes,
                                                       static_cast<uint32_t>(type), &parameters));
        return parameters;
    }

    /* Returns whether rank 0 has ended or left: then the parameters stay as they are. */
    bool has_lost_writer() const {
        uint64_t is_lost = 0;
        detail::check(fabricast_param_store_writer_lost(store_.get(), &is_lost));
        return is_lost != 0;
    }

    /* Stops or continues learning; without effect on other ranks than 0. */
    void freeze(bool is_frozen = true) {
        detail::check(fabricast_param_store_freeze(store_.get(), is_frozen ? 1 : 0));
    }

    /* The parameters as JSON. `topology` names the machines. */
    std::string save(const std::string &topology = {}) const {
        char *text = nullptr;
        detail::check(fabricast_param_store_save(store_.get(), topology.c_str(), &text));
        std::unique_ptr<char, fabricast_status (*)(char *)> owner(text, fabricast_text_free);
        return text;
    }

    /* Uses saved parameters from now on; without effect on other ranks than 0. */
    void load(std::string_view json, const std::string &topology = {}) {
        detail::check(fabricast_param_store_load(store_.get(), topology.c_str(), json.data(), json.size()));
    }

    /* Leaves: no rank waits for this one any more. */
    void leave() { detail::check(fabricast_param_store_leave(store_.release())); }

    fabricast_param_store *get() const noexcept { return store_.get(); }

private:
    std::unique_ptr<fabricast_param_store, detail::Close> store_;
};

} // namespace collective
} // namespace fabricast

#endif
