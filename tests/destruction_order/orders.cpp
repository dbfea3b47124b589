// Two agents, a region and a route whose destructors run in every order while transfers are in flight.
//
// orders ROUNDS: exits with 0 if no byte moved after the end or outside the region, and no destructor took long.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>

extern "C" {
void endings_delay(unsigned long long microseconds);
void *endings_agent();
void *endings_region(void *agent);
void *endings_route(void *initiator, void *target, void *region);
int endings_put(void *initiator, void *route);
void endings_drop_agent(void *);
void endings_drop_region(void *);
void endings_drop_route(void *);
int endings_check(void *region);
int endings_check_later();
}

using Handle = std::unique_ptr<void, void (*)(void *)>;

static void fail(const char *what) {
    std::fprintf(stderr, "orders: %s\n", what);
    std::exit(1);
}

static Handle own(void *made, void (*end)(void *), const char *what) {
    if (made == nullptr)
        fail(what);
    return Handle(made, end);
}

int main(int count, char **words) {
    const int rounds = count > 1 ? std::atoi(words[1]) : 10;
    for (int round = 0; round < rounds; ++round) {
        std::array<int, 4> order = {0, 1, 2, 3};
        do {
            Handle initiator = own(endings_agent(), endings_drop_agent, "no agent");
            Handle target = own(endings_agent(), endings_drop_agent, "no agent");
            Handle region = own(endings_region(target.get()), endings_drop_region, "no region");
            Handle route = own(endings_route(initiator.get(), target.get(), region.get()),
                               endings_drop_route, "no route");
            void *memory = region.get();
            endings_delay(round % 4 * 100);
            if (endings_put(initiator.get(), route.get()) != 6)
                fail("the puts were not started");
            const auto start = std::chrono::steady_clock::now();
            std::array<Handle *, 4> all = {&initiator, &target, &region, &route};
            for (int which : order)
                all[which]->reset();
            if (std::chrono::steady_clock::now() - start > std::chrono::seconds(5))
                fail("destruction took more than 5 s");
            endings_delay(0);
            if (endings_check(memory) != 0)
                fail("bytes moved after the end, or outside the region");
        } while (std::next_permutation(order.begin(), order.end()));
    }
    if (endings_check_later() != 0)
        fail("bytes moved later, or outside the region");
    std::printf("24 orders, %d times each\n", rounds);
}
