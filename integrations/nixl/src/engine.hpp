/* The backend: an agent of Fabricast for an agent of NIXL. */
#ifndef FABRICAST_NIXL_SRC_ENGINE_HPP
#define FABRICAST_NIXL_SRC_ENGINE_HPP

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <unistd.h>

#include "backend/backend_engine.h"

#include <fabricast.h>

#include "message.hpp"
#include "settings.hpp"

namespace fabricast_nixl {

void report_exception(const char *operation, const char *cause);

/* Another agent of NIXL, or this one, as its connection information describes it. */
struct Connection {
    std::string agent;
    std::string card;
    /* Bytes of the longest notice that both sides know. */
    std::size_t bytes_of_part = 0;
    /* 0 until it is connected. */
    fabricast_peer peer = 0;
    bool is_disconnected = false;
    bool name_is_sent = false;
    std::uint8_t generation = 0;
    std::uint32_t next_ordered = 0;
    std::uint32_t next_of_transfer = 0;
};

/* A route between two regions. It is closed when either is removed; requests may keep it longer. */
class Route {
public:
    explicit Route(fabricast_route *handle) : handle_(handle) {}
    ~Route() { close(); }
    Route(const Route &) = delete;
    Route &operator=(const Route &) = delete;

    fabricast_route *handle() const { return handle_; }
    void close() {
        fabricast_route_close(handle_);
        handle_ = nullptr;
    }

private:
    fabricast_route *handle_;
};

/* How operations of this agent use memory. */
struct Use {
    std::size_t in_flight = 0;
    /* An operation failed: what it left in flight, in a fabric, may still access the memory. */
    bool has_failed = false;
};

/* Memory of this agent. */
class LocalMemory final : public nixlBackendMD {
public:
    LocalMemory() : nixlBackendMD(true) {}

    fabricast_memory *memory = nullptr;
    fabricast_region *region = nullptr;
    std::uintptr_t start = 0;
    std::size_t length = 0;
    std::string descriptor;
    const std::shared_ptr<Use> use = std::make_shared<Use>(); /* with the lock of the state */
    /* Becomes true when nothing uses it any more. */
    const std::shared_ptr<std::atomic<bool>> is_released = std::make_shared<std::atomic<bool>>(false);
};

/* An operation in flight. */
struct Operation {
    fabricast_token token;
    std::shared_ptr<Use> use; /* of its local memory */
};

/* Memory of an agent as the target of transfers. */
class RemoteMemory final : public nixlBackendMD {
public:
    RemoteMemory() : nixlBackendMD(false) {}
    ~RemoteMemory() override {
        for (auto &[local, route] : routes) route->close();
    }

    std::shared_ptr<Connection> connection;
    std::uintptr_t start = 0;
    std::size_t length = 0;
    std::string descriptor;
    std::unordered_map<const LocalMemory *, std::shared_ptr<Route>> routes;
};

/* An agent in a message: its name, shortened and printable. */
std::string quoted(const std::string &agent);

/* A transfer, which can be posted repeatedly: a list of blocks for each route. */
class Request final : public nixlBackendReqH {
public:
    struct Blocks {
        std::shared_ptr<Route> route;
        std::shared_ptr<Use> use; /* of the local memory */
        std::vector<fabricast_block> blocks;
    };

    std::shared_ptr<Connection> connection;
    std::vector<Blocks> lists;
    std::vector<Operation> in_flight;
    /* Each operation carries a part of a notification. */
    bool has_message = false;
    /* The first failure among the operations. */
    nixl_status_t failure = NIXL_SUCCESS;
    /* NIXL does not use it any more; it exists until its operations have completed. */
    bool is_released = false;
};

class Engine final : public nixlBackendEngine {
public:
    explicit Engine(const nixlBackendInitParams *parameters);
    ~Engine() override;

    bool supportsRemote() const override { return true; }
    bool supportsLocal() const override { return true; }
    bool supportsNotif() const override { return true; }
    nixl_mem_list_t getSupportedMems() const override { return {DRAM_SEG, VRAM_SEG}; }

    nixl_status_t getConnInfo(std::string &info) const override;
    nixl_status_t loadRemoteConnInfo(const std::string &agent, const std::string &info) override;
    nixl_status_t connect(const std::string &agent) override;
    nixl_status_t disconnect(const std::string &agent) override;

    nixl_status_t registerMem(const nixlBlobDesc &described, const nixl_mem_t &kind,
                              nixlBackendMD *&registered) override;
    nixl_status_t deregisterMem(nixlBackendMD *registered) override;
    nixl_status_t getPublicData(const nixlBackendMD *registered, std::string &data) const override;
    nixl_status_t loadRemoteMD(const nixlBlobDesc &described, const nixl_mem_t &kind, const std::string &agent,
                               nixlBackendMD *&loaded) override;
    nixl_status_t loadLocalMD(nixlBackendMD *registered, nixlBackendMD *&loaded) override;
    nixl_status_t unloadMD(nixlBackendMD *loaded) override;

    nixl_status_t prepXfer(const nixl_xfer_op_t &operation, const nixl_meta_dlist_t &local,
                           const nixl_meta_dlist_t &remote, const std::string &agent, nixlBackendReqH *&handle,
                           const nixl_opt_b_args_t *options = nullptr) const override;
    nixl_status_t postXfer(const nixl_xfer_op_t &operation, const nixl_meta_dlist_t &local,
                           const nixl_meta_dlist_t &remote, const std::string &agent, nixlBackendReqH *&handle,
                           const nixl_opt_b_args_t *options = nullptr) const override;
    nixl_status_t checkXfer(nixlBackendReqH *handle) const override;
    nixl_status_t releaseReqH(nixlBackendReqH *handle) const override;

    nixl_status_t getNotifs(notif_list_t &messages) override;
    nixl_status_t genNotif(const std::string &agent, const std::string &message) const override;

private:
    /* The methods of NIXL are const for what changes connections and routes. */
    struct State {
        std::mutex lock;
        std::unordered_map<std::string, std::shared_ptr<Connection>> connections;
        std::unordered_set<RemoteMemory *> loaded;
        std::uint8_t next_generation = 0;
        std::unordered_set<Request *> requests;
        /* Number of those that were released in flight. */
        std::size_t released = 0;
        Inbox inbox;
    };

    void start(const nixlBackendInitParams &parameters);
    /* Logs the last error of the library, and returns its status for NIXL. */
    nixl_status_t failed(const std::string &operation) const;
    /* Runs a function for NIXL, to which no exception may pass. */
    template <typename Function>
    nixl_status_t guarded(const char *operation, Function function) const;

    /* With the lock held: */
    std::shared_ptr<Connection> find(const std::string &agent) const;
    nixl_status_t ensure_connected(Connection &connection) const;
    void close(Connection &connection) const;
    nixl_status_t send(Connection &connection, Kind kind, std::uint32_t number, const std::string &message,
                       std::size_t first, std::size_t count) const;
    nixl_status_t send_name(Connection &connection) const;
    nixl_status_t find_route(RemoteMemory &remote, const LocalMemory &local, std::shared_ptr<Route> &route) const;
    nixl_status_t load(RemoteMemory &memory, const std::string &agent, nixlBackendMD *&loaded);
    nixl_status_t prepare(nixl_xfer_op_t operation, const nixl_meta_dlist_t &local, const nixl_meta_dlist_t &remote,
                          Request &request) const;
    nixl_status_t post(nixl_xfer_op_t operation, Request &request, const std::string *message) const;
    nixl_status_t collect(Request &request) const;
    /* Collects the outcomes of all requests, and deletes released ones. */
    void collect_all() const;

    nixl_status_t wait_for_operations(LocalMemory &memory, std::chrono::steady_clock::time_point end);
    nixl_status_t release(LocalMemory &memory);
    void handle(const fabricast_agent_event &event);
    void poll_events();
    void run_events();

    const pid_t process_ = ::getpid();
    Settings settings_;
    fabricast_agent *agent_ = nullptr;
    const std::unique_ptr<State> state_ = std::make_unique<State>();
    std::atomic<bool> is_ending_{false};
    std::thread events_;
};

template <typename Function>
nixl_status_t Engine::guarded(const char *operation, Function function) const {
    try {
        return function();
    } catch (const std::exception &error) {
        report_exception(operation, error.what());
        return NIXL_ERR_BACKEND;
    }
}

} // namespace fabricast_nixl

#endif
