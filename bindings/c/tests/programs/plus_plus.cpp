// The headers in C++, with owners that close their handles.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>

#include <fabricast.h>
#include <rgaps.h>

namespace {

void done(fabricast_status status)
{
    if (status != FABRICAST_OK)
        throw std::runtime_error(fabricast_error_message());
}

template <typename T, fabricast_status (*close)(T *)>
struct Closer {
    void operator()(T *handle) const { close(handle); }
};

template <typename T, fabricast_status (*close)(T *)>
using Owner = std::unique_ptr<T, Closer<T, close>>;

using Node = Owner<fabricast_node, fabricast_node_leave>;
using Topic = Owner<fabricast_topic, fabricast_topic_close>;
using Publisher = Owner<fabricast_publisher, fabricast_publisher_close>;
using Subscriber = Owner<fabricast_subscriber, fabricast_subscriber_close>;
using Sample = Owner<fabricast_sample, fabricast_sample_release>;

template <typename Owner, typename Open, typename... Arguments>
Owner open(Open function, Arguments... arguments)
{
    typename Owner::pointer handle = nullptr;
    done(function(arguments..., &handle));
    return Owner(handle);
}

// Agents are closed with a timeout.
struct AgentCloser {
    void operator()(fabricast_agent *agent) const
    {
        fabricast_agent_close(agent, FABRICAST_SECONDS(60));
    }
};

struct MemoryCloser {
    void operator()(fabricast_memory *memory) const
    {
        fabricast_memory_close(memory, FABRICAST_SECONDS(60));
    }
};

using Agent = std::unique_ptr<fabricast_agent, AgentCloser>;
using Memory = std::unique_ptr<fabricast_memory, MemoryCloser>;
using Region = Owner<fabricast_region, fabricast_region_close>;
using Route = Owner<fabricast_route, fabricast_route_close>;
using Prepared = Owner<fabricast_prepared, fabricast_prepared_close>;
using Stream = Owner<fabricast_stream, fabricast_stream_close>;

void agents()
{
    // Destroyed in the reverse order: routes and regions before their memory.
    Agent here = open<Agent>(fabricast_agent_start, nullptr);
    Agent there = open<Agent>(fabricast_agent_start, nullptr);
    Memory target = open<Memory>(fabricast_memory_allocate, "host", std::size_t(4096));
    std::string greeting(4096, 'x');
    Memory source = open<Memory>(fabricast_memory_adopt, &greeting[0], greeting.size());
    Region local = open<Region>(fabricast_region_register, here.get(), source.get(),
                                FABRICAST_LOCAL_ONLY);
    Region remote = open<Region>(fabricast_region_register, there.get(), target.get(),
                                 FABRICAST_WRITE);
    std::string card(16384, ' ');
    size_t length;
    done(fabricast_agent_publish(there.get(), "target", remote.get()));
    done(fabricast_agent_card(there.get(), &card[0], card.size(), &length));
    fabricast_peer peer;
    done(fabricast_agent_connect(here.get(), card.data(), length, FABRICAST_SECONDS(60), &peer));
    Route route = open<Route>(fabricast_agent_route_to, here.get(), peer, "target", local.get(),
                              FABRICAST_SECONDS(60));
    const fabricast_notice notice = {sizeof notice, 7, "done", 4};
    done(fabricast_agent_put_all(here.get(), route.get(), &notice, nullptr));
    done(fabricast_agent_flush(here.get(), peer, FABRICAST_SECONDS(60)));
    std::string arrived(4096, ' ');
    done(fabricast_memory_read(target.get(), 0, &arrived[0], arrived.size()));
    if (arrived != greeting)
        throw std::runtime_error("other bytes arrived");

    // Two halves, of which the second is put after the work of a stream.
    const fabricast_block halves[] = {{0, 0, 2048}, {2048, 2048, 2048}};
    Prepared prepared =
        open<Prepared>(fabricast_agent_prepare_put, here.get(), route.get(), halves, size_t(2));
    Stream stream = open<Stream>(fabricast_stream_adopt, "emulated:0", nullptr);
    greeting.assign(4096, 'y');
    const std::uint32_t second[] = {1};
    fabricast_token token;
    done(fabricast_agent_submit_after(here.get(), prepared.get(), second, 1, nullptr, stream.get(),
                                      &token));
    done(fabricast_agent_wait(here.get(), token, FABRICAST_SECONDS(60), nullptr));
    const fabricast_part part = {route.get(), halves, 1};
    greeting.replace(0, 2048, 2048, 'z');
    done(fabricast_agent_put_parts(here.get(), &part, 1, nullptr, &token));
    done(fabricast_agent_wait(here.get(), token, FABRICAST_SECONDS(60), nullptr));
    done(fabricast_agent_cancel(here.get(), token, nullptr));
    done(fabricast_memory_read(target.get(), 0, &arrived[0], arrived.size()));
    if (arrived != greeting)
        throw std::runtime_error("the halves are wrong");
}

void run()
{
    Node node = open<Node>(fabricast_node_join, nullptr);
    fabricast_topic_settings settings;
    done(fabricast_topic_settings_init(&settings, sizeof settings));
    settings.largest = 4096;
    Topic topic = open<Topic>(fabricast_topic_open, node.get(), "plus plus", &settings);
    Publisher publisher = open<Publisher>(fabricast_publisher_open, topic.get());
    Subscriber subscriber = open<Subscriber>(fabricast_subscriber_open, topic.get());

    const std::string greeting = "hello from C++";
    done(fabricast_publisher_push(publisher.get(), greeting.data(), greeting.size(),
                                  FABRICAST_SECONDS(60)));
    Sample sample =
        open<Sample>(fabricast_subscriber_pull, subscriber.get(), FABRICAST_SECONDS(60));
    std::string arrived(greeting.size(), ' ');
    done(fabricast_sample_read(sample.get(), 0, &arrived[0], arrived.size()));
    if (arrived != greeting)
        throw std::runtime_error("arrived: " + arrived);

    agents();

    char name[] = "plus plus by name";
    rgaps_publisher_t *simple = publisher_init(name);
    rgaps_subscriber_t *reader = subscriber_init(name);
    if (simple == nullptr || reader == nullptr || publisher_push(simple, sizeof name, name) != 0)
        throw std::runtime_error(fabricast_error_message());
    const void *pulled = subscriber_pull(reader);
    if (pulled == nullptr || std::memcmp(pulled, name, sizeof name) != 0)
        throw std::runtime_error("another message");
    subscriber_destroy(reader);
    publisher_destroy(simple);
}

} // namespace

int main()
{
    try {
        run();
    } catch (const std::exception &error) {
        std::cerr << error.what() << "\n";
        return 1;
    }
    if (fabricast_open_handles() != 0)
        return 1;
    std::cout << "plus_plus: ok\n";
    return 0;
}
