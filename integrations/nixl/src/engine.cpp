#include "engine.hpp"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <stdexcept>

#include <pthread.h>
#include <unistd.h>

#include "log.hpp"

namespace fabricast_nixl {
namespace {

/* Connection information: these bytes, bytes of the longest notice (little-endian), and the card. */
const std::string magic = "FABRICAST-NIXL-1";
constexpr std::size_t bytes_of_number = 4;
/* A notice of fewer bytes would need too many parts for a message. */
constexpr std::size_t shortest_notice = 16;

/* How long the end of a connection, or of the backend, waits for what is in flight. */
constexpr fabricast_timeout end_timeout = FABRICAST_SECONDS(2);
/* How often the thread of the backend makes progress for transfers that no thread asks for. */
constexpr fabricast_timeout event_timeout = FABRICAST_MILLISECONDS(20);
/* How long deregistering waits for peers that have a route to it, without copying. */
constexpr std::chrono::milliseconds route_timeout{20};
constexpr std::chrono::microseconds pause_between_looks{100};
/* Events that a call handles before it returns. */
constexpr int most_events = 4096;

nixl_status_t status_of(fabricast_status status) {
    switch (status) {
        case FABRICAST_OK: return NIXL_SUCCESS;
        case FABRICAST_E_CLOSED: return NIXL_ERR_REMOTE_DISCONNECT;
        case FABRICAST_E_INVALID_ARGUMENT: return NIXL_ERR_INVALID_PARAM;
        case FABRICAST_E_NOT_FOUND:
        case FABRICAST_E_STALE: return NIXL_ERR_NOT_FOUND;
        case FABRICAST_E_DENIED: return NIXL_ERR_NOT_ALLOWED;
        case FABRICAST_E_MALFORMED:
        case FABRICAST_E_VERSION_MISMATCH: return NIXL_ERR_MISMATCH;
        case FABRICAST_E_CANCELLED: return NIXL_ERR_CANCELED;
        default: return NIXL_ERR_BACKEND;
    }
}

/* The name of an agent as a label: printable, and not too long. */
std::string label_of(const std::string &agent) {
    std::string label = agent.substr(0, 64);
    for (char &letter : label)
        if (letter < ' ' || letter > '~') letter = '?';
    return label;
}

/* Takes a flag of memory that nothing uses any more. */
using Flag = std::shared_ptr<std::atomic<bool>>;
void memory_is_released(void *flag) {
    const std::unique_ptr<Flag> taken(static_cast<Flag *>(flag));
    (*taken)->store(true);
}

const char *text_or_null(const std::string &text) { return text.empty() ? nullptr : text.c_str(); }

} // namespace

std::string quoted(const std::string &agent) { return "agent \"" + label_of(agent) + "\""; }

void report_exception(const char *operation, const char *cause) {
    log(Level::Error, std::string(operation) + " failed: " + cause);
}

nixl_status_t Engine::failed(const std::string &operation) const {
    const fabricast_status status = fabricast_error_status();
    log(Level::Error, operation + " failed: " + fabricast_error_message() + " (" + fabricast_status_name(status) + ")");
    return status_of(status);
}

/* ------------------------------------------------------------------ start and end */

Engine::Engine(const nixlBackendInitParams *parameters) : nixlBackendEngine(parameters) {
    try {
        start(*parameters);
    } catch (const std::exception &error) {
        log(Level::Error, std::string("cannot start the backend: ") + error.what());
        initErr = true;
    }
}

void Engine::start(const nixlBackendInitParams &parameters) {
    settings_ = Settings::read(getCustomParams());
    if (localAgent.size() > longest_name) throw std::invalid_argument("the name of the agent has more than " + std::to_string(longest_name) +
                                                                             " bytes. Use a shorter one");
    const std::string label = label_of(localAgent);
    fabricast_agent_options options;
    fabricast_agent_options_init(&options, sizeof options);
    options.label = label.c_str();
    options.directory = text_or_null(settings_.directory);
    options.fabric = text_or_null(settings_.fabric);
    options.source = text_or_null(settings_.source);
    options.rails = settings_.rails;
    options.lost_after = settings_.lost_after;
    fabricast_status status = fabricast_agent_start(&options, &agent_);
    if (status == FABRICAST_E_NO_PROVIDER && settings_.fabric == "auto") {
        log(Level::Warn, std::string("without a fabric, other machines cannot be reached: ") +
                             fabricast_error_message());
        options.fabric = nullptr;
        status = fabricast_agent_start(&options, &agent_);
    }
    if (status != FABRICAST_OK) throw std::runtime_error(fabricast_error_message());
    if (parameters.enableProgTh) {
        /* Signals are for the threads of the program. */
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            events_ = std::thread([this] { run_events(); });
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        pthread_setname_np(events_.native_handle(), "fabricast-nixl");
    }
}

Engine::~Engine() {
    is_ending_ = true;
    if (::getpid() != process_) {
        /* The handle and the thread are those of the parent: its thread cannot be joined. */
        if (events_.joinable()) new std::thread(std::move(events_));
        return;
    }
    if (agent_ && fabricast_agent_close(agent_, end_timeout) != FABRICAST_OK)
        log(Level::Warn, std::string("end of the backend: ") + fabricast_error_message());
    if (events_.joinable()) events_.join();
    for (Request *request : state_->requests)
        if (request->is_released) delete request;
}

/* -------------------------------------------------------------------- connections */

nixl_status_t Engine::getConnInfo(std::string &info) const {
    return guarded("getConnInfo", [&] {
        std::size_t length = 0;
        std::string card;
        if (fabricast_agent_card(agent_, nullptr, 0, &length) != FABRICAST_OK) return failed("getConnInfo");
        card.resize(length);
        if (fabricast_agent_card(agent_, card.data(), card.size(), &length) != FABRICAST_OK)
            return failed("getConnInfo");
        card.resize(length);
        info = magic;
        for (unsigned shift = 0; shift < 8 * bytes_of_number; shift += 8)
            info += static_cast<char>(std::uint32_t{FABRICAST_MAX_NOTICE} >> shift & 0xff);
        info += card;
        return NIXL_SUCCESS;
    });
}

nixl_status_t Engine::loadRemoteConnInfo(const std::string &agent, const std::string &info) {
    return guarded("loadRemoteConnInfo", [&] {
        if (info.size() < magic.size() + bytes_of_number || info.compare(0, magic.size(), magic) != 0) {
            log(Level::Error, "connection information of " + quoted(agent) +
                                  " is malformed, or of another version of the plug-in");
            return NIXL_ERR_MISMATCH;
        }
        std::size_t longest = 0;
        for (std::size_t index = 0; index < bytes_of_number; index++)
            longest |= std::size_t{static_cast<std::uint8_t>(info[magic.size() + index])} << (8 * index);
        if (longest < shortest_notice) {
            log(Level::Error, "connection information of " + quoted(agent) + " is malformed");
            return NIXL_ERR_MISMATCH;
        }
        auto connection = std::make_shared<Connection>();
        connection->agent = agent;
        connection->bytes_of_part = std::min<std::size_t>(longest, FABRICAST_MAX_NOTICE);
        connection->card = info.substr(magic.size() + bytes_of_number);
        fabricast_card_info about;
        if (fabricast_card_info_of(connection->card.data(), connection->card.size(), &about, sizeof about) !=
            FABRICAST_OK)
            return failed("loading the connection information of " + quoted(agent));
        const std::lock_guard<std::mutex> held(state_->lock);
        auto &known = state_->connections[agent];
        /* NIXL forgets an agent without a call if the rest of its metadata is malformed. */
        if (known && known->card == connection->card) return NIXL_SUCCESS;
        if (known && known.use_count() > 1) {
            log(Level::Error, "another agent with the name \"" + label_of(agent) + "\" is in use. Remove it first");
            return NIXL_ERR_INVALID_PARAM;
        }
        if (known) close(*known);
        known = std::move(connection);
        return NIXL_SUCCESS;
    });
}

nixl_status_t Engine::connect(const std::string &agent) {
    return guarded("connect", [&] {
        if (agent == localAgent) {
            std::string info;
            nixl_status_t status = getConnInfo(info);
            if (status == NIXL_SUCCESS) status = loadRemoteConnInfo(agent, info);
            if (status != NIXL_SUCCESS) return status;
        }
        const std::lock_guard<std::mutex> held(state_->lock);
        const auto connection = find(agent);
        return connection ? ensure_connected(*connection) : NIXL_ERR_NOT_FOUND;
    });
}

nixl_status_t Engine::disconnect(const std::string &agent) {
    return guarded("disconnect", [&] {
        const std::lock_guard<std::mutex> held(state_->lock);
        const auto connection = find(agent);
        if (!connection) return NIXL_ERR_NOT_FOUND;
        state_->connections.erase(agent);
        close(*connection);
        return NIXL_SUCCESS;
    });
}

void Engine::close(Connection &connection) const {
    connection.is_disconnected = true;
    if (connection.peer != 0 && fabricast_agent_disconnect(agent_, connection.peer, end_timeout) != FABRICAST_OK)
        log(Level::Warn, "disconnecting from " + quoted(connection.agent) + ": " + fabricast_error_message());
}

std::shared_ptr<Connection> Engine::find(const std::string &agent) const {
    const auto found = state_->connections.find(agent);
    return found == state_->connections.end() ? nullptr : found->second;
}

nixl_status_t Engine::ensure_connected(Connection &connection) const {
    if (connection.is_disconnected) return NIXL_ERR_REMOTE_DISCONNECT;
    if (connection.peer == 0) {
        const fabricast_status status = fabricast_agent_connect(
            agent_, connection.card.data(), connection.card.size(), settings_.timeout, &connection.peer);
        if (status != FABRICAST_OK) return failed("connecting to " + quoted(connection.agent));
    }
    return connection.name_is_sent ? NIXL_SUCCESS : send_name(connection);
}

/* ------------------------------------------------------------------------- memory */

nixl_status_t Engine::registerMem(const nixlBlobDesc &described, const nixl_mem_t &kind,
                                  nixlBackendMD *&registered) {
    return guarded("registerMem", [&] {
        registered = nullptr;
        if (kind != DRAM_SEG && kind != VRAM_SEG) {
            log(Level::Error, "only memory of the host and of devices can be registered");
            return NIXL_ERR_NOT_SUPPORTED;
        }
        const std::string operation = "registering " + std::to_string(described.len) + " bytes";
        auto memory = std::make_unique<LocalMemory>();
        memory->start = described.addr;
        memory->length = described.len;
        /* Closing it must not wait for peers that still map it. */
        auto flag = std::make_unique<Flag>(memory->is_released);
        if (fabricast_memory_adopt_with_release(reinterpret_cast<void *>(described.addr), described.len,
                                                memory_is_released, flag.get(), &memory->memory) != FABRICAST_OK)
            return failed(operation);
        flag.release();
        std::size_t length = 0;
        fabricast_status status = fabricast_region_register(agent_, memory->memory, FABRICAST_READ | FABRICAST_WRITE,
                                                            &memory->region);
        if (status == FABRICAST_OK) status = fabricast_region_descriptor(memory->region, nullptr, 0, &length);
        if (status == FABRICAST_OK) {
            memory->descriptor.resize(length);
            status = fabricast_region_descriptor(memory->region, memory->descriptor.data(), length, &length);
        }
        if (status != FABRICAST_OK) {
            const nixl_status_t result = failed(operation);
            fabricast_region_close(memory->region);
            fabricast_memory_close(memory->memory, end_timeout);
            return result;
        }
        memory->descriptor.resize(length);
        registered = memory.release();
        return NIXL_SUCCESS;
    });
}

nixl_status_t Engine::deregisterMem(nixlBackendMD *registered) {
    return guarded("deregisterMem", [&] {
        std::unique_ptr<LocalMemory> memory(static_cast<LocalMemory *>(registered));
        if (!memory) return NIXL_ERR_INVALID_PARAM;
        {
            /* Routes keep the region in use. */
            const std::lock_guard<std::mutex> held(state_->lock);
            for (RemoteMemory *remote : state_->loaded) {
                const auto route = remote->routes.find(memory.get());
                if (route == remote->routes.end()) continue;
                route->second->close();
                remote->routes.erase(route);
            }
        }
        return release(*memory);
    });
}

/* Waits for operations of this agent, also of requests that the program does not look at any more. */
nixl_status_t Engine::wait_for_operations(LocalMemory &memory, std::chrono::steady_clock::time_point end) {
    for (;;) {
        {
            const std::lock_guard<std::mutex> held(state_->lock);
            if (memory.use->in_flight > 0) collect_all();
            if (memory.use->in_flight == 0) return NIXL_SUCCESS;
        }
        if (std::chrono::steady_clock::now() >= end) {
            log(Level::Error, "deregistering " + std::to_string(memory.length) +
                                  " bytes failed: transfers with it are in flight. Keep it allocated");
            return NIXL_ERR_BACKEND;
        }
        std::this_thread::sleep_for(pause_between_looks);
    }
}

nixl_status_t Engine::release(LocalMemory &memory) {
    using Clock = std::chrono::steady_clock;
    const std::string operation = "deregistering " + std::to_string(memory.length) + " bytes";
    const auto end = Clock::now() + std::chrono::nanoseconds(settings_.timeout);
    nixl_status_t result = wait_for_operations(memory, end);
    /* Operations of peers. */
    if (fabricast_agent_withdraw(agent_, memory.region, settings_.timeout) != FABRICAST_OK) result = failed(operation);
    fabricast_region_close(memory.region);
    if (fabricast_memory_close(memory.memory, FABRICAST_NOW) != FABRICAST_OK) result = failed(operation);
    if (result != NIXL_SUCCESS) return result;
    /* Devices and fabrics should have unregistered it before it is freed, and must after a failure. */
    const bool must_end = memory.use->has_failed;
    const auto until = must_end ? end : std::min(end, Clock::now() + route_timeout);
    while (!memory.is_released->load()) {
        if (Clock::now() < until) {
            fabricast_agent_progress(agent_, nullptr);
            std::this_thread::sleep_for(pause_between_looks);
        } else if (must_end) {
            log(Level::Error, operation + " failed: operations that failed may still access it. Keep it allocated");
            return NIXL_ERR_BACKEND;
        } else {
            log(Level::Info, operation + ": another agent still has a route to it. It can be freed");
            break;
        }
    }
    return NIXL_SUCCESS;
}

nixl_status_t Engine::getPublicData(const nixlBackendMD *registered, std::string &data) const {
    return guarded("getPublicData", [&] {
        data = static_cast<const LocalMemory *>(registered)->descriptor;
        return NIXL_SUCCESS;
    });
}

nixl_status_t Engine::loadRemoteMD(const nixlBlobDesc &described, const nixl_mem_t &, const std::string &agent,
                                   nixlBackendMD *&loaded) {
    return guarded("loadRemoteMD", [&] {
        auto memory = std::make_unique<RemoteMemory>();
        memory->start = described.addr;
        memory->length = described.len;
        memory->descriptor = described.metaInfo;
        const nixl_status_t status = load(*memory, agent, loaded);
        if (status == NIXL_SUCCESS) memory.release();
        return status;
    });
}

nixl_status_t Engine::loadLocalMD(nixlBackendMD *registered, nixlBackendMD *&loaded) {
    return guarded("loadLocalMD", [&] {
        const auto *local = static_cast<const LocalMemory *>(registered);
        auto memory = std::make_unique<RemoteMemory>();
        memory->start = local->start;
        memory->length = local->length;
        memory->descriptor = local->descriptor;
        const nixl_status_t status = load(*memory, localAgent, loaded);
        if (status == NIXL_SUCCESS) memory.release();
        return status;
    });
}

nixl_status_t Engine::load(RemoteMemory &memory, const std::string &agent, nixlBackendMD *&loaded) {
    const std::lock_guard<std::mutex> held(state_->lock);
    loaded = nullptr;
    memory.connection = find(agent);
    if (!memory.connection) {
        log(Level::Error, "the connection information of " + quoted(agent) + " was not loaded");
        return NIXL_ERR_NOT_FOUND;
    }
    state_->loaded.insert(&memory);
    loaded = &memory;
    return NIXL_SUCCESS;
}

nixl_status_t Engine::unloadMD(nixlBackendMD *loaded) {
    return guarded("unloadMD", [&] {
        const std::lock_guard<std::mutex> held(state_->lock);
        auto *memory = static_cast<RemoteMemory *>(loaded);
        state_->loaded.erase(memory);
        delete memory;
        return NIXL_SUCCESS;
    });
}

/* ------------------------------------------------------------------ notifications */

nixl_status_t Engine::send(Connection &connection, Kind kind, std::uint32_t number, const std::string &message,
                           std::size_t first, std::size_t count) const {
    for (std::size_t index = first; index < count; index++) {
        const std::string_view data = part_of(message, connection.bytes_of_part, index);
        const Part part{kind, connection.generation, number, static_cast<std::uint32_t>(count),
                        static_cast<std::uint32_t>(index)};
        const fabricast_notice notice = {sizeof notice, part.tag(), data.data(), data.size()};
        if (fabricast_agent_notify(agent_, connection.peer, &notice, nullptr) != FABRICAST_OK)
            return failed("notifying " + quoted(connection.agent));
    }
    return NIXL_SUCCESS;
}

nixl_status_t Engine::send_name(Connection &connection) const {
    connection.generation = state_->next_generation++;
    connection.next_ordered = 0;
    connection.next_of_transfer = 0;
    const std::size_t count = parts_of(localAgent.size(), connection.bytes_of_part, 1);
    const nixl_status_t status = send(connection, Kind::Name, 0, localAgent, 0, count);
    connection.name_is_sent = status == NIXL_SUCCESS;
    return status;
}

nixl_status_t Engine::genNotif(const std::string &agent, const std::string &message) const {
    return guarded("genNotif", [&] {
        const std::lock_guard<std::mutex> held(state_->lock);
        const auto connection = find(agent);
        if (!connection) return NIXL_ERR_NOT_FOUND;
        if (message.size() > longest_message) {
            log(Level::Error, "a notification has more than " + std::to_string(longest_message) + " bytes. Shorten it");
            return NIXL_ERR_INVALID_PARAM;
        }
        nixl_status_t status = ensure_connected(*connection);
        if (status != NIXL_SUCCESS) return status;
        const std::size_t count = parts_of(message.size(), connection->bytes_of_part, 1);
        status = send(*connection, Kind::Ordered, connection->next_ordered, message, 0, count);
        connection->next_ordered = (connection->next_ordered + 1) % Part::numbers;
        /* The receiver would wait for the rest of it: later messages are of another generation. */
        if (status != NIXL_SUCCESS) connection->name_is_sent = false;
        return status;
    });
}

nixl_status_t Engine::getNotifs(notif_list_t &messages) {
    return guarded("getNotifs", [&] {
        if (!messages.empty()) return NIXL_ERR_INVALID_PARAM;
        if (!events_.joinable()) poll_events();
        const std::lock_guard<std::mutex> held(state_->lock);
        state_->inbox.take(messages);
        return NIXL_SUCCESS;
    });
}

void Engine::handle(const fabricast_agent_event &event) {
    Identity from;
    std::copy(std::begin(event.from), std::end(event.from), from.begin());
    const std::lock_guard<std::mutex> held(state_->lock);
    switch (event.kind) {
        case FABRICAST_AGENT_EVENT_JOINED: state_->inbox.joined(from); break;
        case FABRICAST_AGENT_EVENT_LEFT: state_->inbox.left(from); break;
        case FABRICAST_AGENT_EVENT_NOTICE: {
            const std::size_t length = std::min<std::size_t>(event.length, sizeof event.data);
            const std::string_view data(reinterpret_cast<const char *>(event.data), length);
            const std::string problem = state_->inbox.add(from, event.tag, data);
            if (!problem.empty()) log(Level::Error, problem);
            break;
        }
        case FABRICAST_AGENT_EVENT_RAIL_LOST:
            log(Level::Info, "a rail to " + quoted(event.label) + " was lost: " + event.reason);
            break;
        default: break;
    }
}

void Engine::poll_events() {
    fabricast_agent_event event;
    for (int count = 0; count < most_events; count++) {
        const fabricast_status status = fabricast_agent_next_event(agent_, FABRICAST_NOW, &event, sizeof event);
        if (status == FABRICAST_E_WOULD_BLOCK) return;
        if (status != FABRICAST_OK) {
            failed("waiting for events");
            return;
        }
        handle(event);
    }
}

void Engine::run_events() {
    fabricast_agent_event event;
    while (!is_ending_) {
        const fabricast_status status = fabricast_agent_next_event(agent_, event_timeout, &event, sizeof event);
        try {
            if (status == FABRICAST_OK) {
                handle(event);
                continue;
            }
            if (status == FABRICAST_E_DEADLINE_EXCEEDED || status == FABRICAST_E_INTERRUPTED) continue;
            if (status != FABRICAST_E_CLOSED && !is_ending_) failed("waiting for events");
        } catch (const std::exception &error) {
            report_exception("handling an event", error.what());
            continue;
        }
        /* The handle is closed, or belongs to the parent of this process. */
        return;
    }
}

} // namespace fabricast_nixl
