// The classes of fabricast_collective.hpp, with two ranks in processes.
#include <fabricast_collective.hpp>

#include <cstdlib>
#include <iostream>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

using namespace fabricast::collective;

namespace {

void check(bool is_right, const char *what)
{
    if (is_right)
        return;
    std::cerr << "failed: " << what << std::endl;
    std::exit(1);
}

Options options(const char *job)
{
    Options options;
    options->job = job;
    options->first_alpha = 900;
    return options;
}

void operations(uint32_t rank)
{
    Domain domain = Domain::join(2, rank, options("c++"));
    check(domain.rank() == rank && domain.size() == 2, "rank and size");
    std::vector<double> sums{1, double(rank)};
    domain.all_reduce(sums.data(), sums.size());
    check(sums == std::vector<double>({2, 1}), "all-reduce");
    domain.reduce(sums.data(), sums.size(), 1, Reduce::Product);
    check(sums == (rank == 1 ? std::vector<double>({4, 1}) : std::vector<double>({2, 1})), "reduce");
    int32_t own = int32_t(rank) + 5, taken = 0;
    std::vector<int32_t> all(2);
    domain.all_gather(&own, all.data(), 1);
    check(all == std::vector<int32_t>({5, 6}), "all-gather");
    domain.reduce_scatter(all.data(), &taken, 1, Reduce::Max);
    check(taken == own, "reduce-scatter");
    std::vector<int32_t> received(2);
    domain.all_to_all(all.data(), received.data(), 1);
    check(received == std::vector<int32_t>({own, own}), "all-to-all");
    domain.gather(&own, rank == 0 ? received.data() : nullptr, 1);
    check(rank == 1 || received == all, "gather");
    domain.scatter(rank == 1 ? all.data() : nullptr, &taken, 1, 1);
    check(taken == own, "scatter");
    domain.broadcast(&taken, 1, 1);
    check(taken == 6, "broadcast");
    domain.barrier();
    try {
        domain.all_reduce(sums.data(), 1 + rank);
        check(false, "different calls");
    } catch (const Error &error) {
        check(error.status() == FABRICAST_E_MISMATCH && error.ranks().size() == 2, error.what());
    }
    Domain moved = std::move(domain);
    check(moved.get() != nullptr && domain.get() == nullptr, "moved");
}

void parameters(uint32_t rank)
{
    constexpr uint64_t bytes = 1 << 24;
    ShmParamStore store(2, rank, options("c++"));
    Entry entry{};
    for (int round = 0; round < 30; round++) {
        entry = store.enter(Operation::AllGather, bytes);
        const uint64_t fast = bytes * entry.parameters.alpha / 1000;
        store.record(entry, {fast / 300, (bytes - fast) / 30, fast, bytes - fast, 1});
    }
    check(entry.number == 30, "number");
    check(entry.parameters.alpha > 880 && entry.parameters.alpha < 930, "share of the fast path");
    check(store.parameters(Operation::AllGather, bytes).alpha == entry.parameters.alpha, "parameters");
    check(rank == 1 || !store.has_lost_writer(), "writer");
    const std::string json = store.save("two paths");
    store.load(json, "two paths");
    store.freeze();
    store.freeze(false);
    try {
        store.load(json, "others");
        check(false, "another topology");
    } catch (const Error &error) {
        check(error.status() == FABRICAST_E_MALFORMED, error.what());
    }
    store.leave();
}

} // namespace

int main()
{
    const pid_t child = fork();
    const uint32_t rank = child == 0 ? 1 : 0;
    alarm(120);
    operations(rank);
    parameters(rank);
    check(fabricast_open_handles() == 0, "handles are open");
    if (child == 0)
        return 0;
    int status = 1;
    check(waitpid(child, &status, 0) == child && status == 0, "rank 1");
    std::cout << "collectives in C++: ok" << std::endl;
}
