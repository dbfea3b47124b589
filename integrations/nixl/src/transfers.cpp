/* Transfers: from lists of descriptors to lists of blocks, one for each pair of regions. */

#include "engine.hpp"

#include <map>
#include <utility>

#include "log.hpp"

namespace fabricast_nixl {
namespace {

bool is_within(const nixlMetaDesc &descriptor, std::uintptr_t start, std::size_t length) {
    return descriptor.addr >= start && descriptor.addr - start <= length &&
           descriptor.len <= length - (descriptor.addr - start);
}

/* Appends a block, or extends the last one, if it follows it on both sides. */
void append(std::vector<fabricast_block> &blocks, const fabricast_block &block) {
    if (!blocks.empty()) {
        fabricast_block &last = blocks.back();
        if (last.to + last.length == block.to && last.from + last.length == block.from) {
            last.length += block.length;
            return;
        }
    }
    blocks.push_back(block);
}

nixl_status_t invalid(const std::string &cause) {
    log(Level::Error, "a transfer is invalid: " + cause);
    return NIXL_ERR_INVALID_PARAM;
}

} // namespace

nixl_status_t Engine::find_route(RemoteMemory &remote, const LocalMemory &local,
                                 std::shared_ptr<Route> &route) const {
    const auto found = remote.routes.find(&local);
    if (found != remote.routes.end()) {
        route = found->second;
        return NIXL_SUCCESS;
    }
    Connection &connection = *remote.connection;
    const nixl_status_t status = ensure_connected(connection);
    if (status != NIXL_SUCCESS) return status;
    const char *policy = settings_.policy.empty() ? nullptr : settings_.policy.c_str();
    fabricast_route *handle = nullptr;
    if (fabricast_agent_join(agent_, connection.peer, local.region, remote.descriptor.data(),
                             remote.descriptor.size(), policy, settings_.timeout, &handle) != FABRICAST_OK)
        return failed("joining memory of " + quoted(connection.agent));
    route = std::make_shared<Route>(handle);
    const char *path = "", *fallback = "";
    if (fabricast_route_path(handle, &path) == FABRICAST_OK &&
        fabricast_route_fallback(handle, &fallback) == FABRICAST_OK) {
        const std::string text = std::to_string(local.length) + " bytes here, " + std::to_string(remote.length) +
                                 " bytes of " + quoted(connection.agent) + ": path " + path;
        if (*fallback)
            log(Level::Warn, text + ", because of: " + fallback);
        else
            log(Level::Info, text);
        const char *verdicts = "";
        if (is_logged(Level::Debug) && fabricast_route_explain(handle, &verdicts) == FABRICAST_OK)
            log(Level::Debug, std::string("paths:\n") + verdicts);
    }
    remote.routes.emplace(&local, route);
    return NIXL_SUCCESS;
}

nixl_status_t Engine::prepare(nixl_xfer_op_t operation, const nixl_meta_dlist_t &local,
                              const nixl_meta_dlist_t &remote, Request &request) const {
    const int count = local.descCount();
    if (count == 0 || count != remote.descCount())
        return invalid(std::to_string(count) + " local and " + std::to_string(remote.descCount()) +
                       " remote descriptors");
    using Pair = std::pair<const LocalMemory *, RemoteMemory *>;
    std::map<Pair, std::size_t> lists;
    Pair last{nullptr, nullptr};
    std::size_t list = 0;
    for (int index = 0; index < count; index++) {
        const nixlMetaDesc &here = local[index], &there = remote[index];
        const auto *source = static_cast<const LocalMemory *>(here.metadataP);
        auto *target = static_cast<RemoteMemory *>(there.metadataP);
        if (!source || !target) return invalid("a descriptor without registered memory");
        if (here.len != there.len) return invalid("descriptors of different lengths");
        if (!is_within(here, source->start, source->length) || !is_within(there, target->start, target->length))
            return invalid("a descriptor outside of its memory");
        if (target->connection != request.connection) return invalid("descriptors of several agents");
        if (here.len == 0) continue;
        const Pair pair{source, target};
        if (pair != last) {
            const auto [found, is_new] = lists.emplace(pair, request.lists.size());
            if (is_new) {
                std::shared_ptr<Route> route;
                const nixl_status_t status = find_route(*target, *source, route);
                if (status != NIXL_SUCCESS) return status;
                request.lists.push_back({std::move(route), source->use, {}});
            }
            last = pair;
            list = found->second;
        }
        const std::uint64_t offset = here.addr - source->start, remote_offset = there.addr - target->start;
        const bool is_put = operation == NIXL_WRITE;
        append(request.lists[list].blocks,
               {is_put ? remote_offset : offset, is_put ? offset : remote_offset, here.len});
    }
    return NIXL_SUCCESS;
}

nixl_status_t Engine::prepXfer(const nixl_xfer_op_t &operation, const nixl_meta_dlist_t &local,
                               const nixl_meta_dlist_t &remote, const std::string &agent, nixlBackendReqH *&handle,
                               const nixl_opt_b_args_t *) const {
    return guarded("prepXfer", [&] {
        handle = nullptr;
        if (operation != NIXL_WRITE && operation != NIXL_READ) return NIXL_ERR_INVALID_PARAM;
        auto request = std::make_unique<Request>();
        const std::lock_guard<std::mutex> held(state_->lock);
        request->connection = find(agent);
        if (!request->connection) return NIXL_ERR_NOT_FOUND;
        const nixl_status_t status = prepare(operation, local, remote, *request);
        if (status != NIXL_SUCCESS) return status;
        state_->requests.insert(request.get());
        handle = request.release();
        return NIXL_SUCCESS;
    });
}

nixl_status_t Engine::post(nixl_xfer_op_t operation, Request &request, const std::string *message) const {
    Connection &connection = *request.connection;
    nixl_status_t status = ensure_connected(connection);
    if (status != NIXL_SUCCESS) return status;
    std::size_t count = 0;
    std::uint32_t number = 0;
    if (message) {
        count = parts_of(message->size(), connection.bytes_of_part, request.lists.size());
        number = connection.next_of_transfer;
        connection.next_of_transfer = (number + 1) % Part::numbers;
    }
    /* The message is complete with the notices of all operations, so it follows their data. */
    for (std::size_t index = 0; index < request.lists.size(); index++) {
        const Request::Blocks &list = request.lists[index];
        if (!list.route->handle()) {
            log(Level::Error, "memory of a transfer was deregistered. Register it, and create the transfer again");
            return NIXL_ERR_NOT_FOUND;
        }
        fabricast_notice notice = {sizeof notice, 0, nullptr, 0};
        if (message) {
            const std::string_view data = part_of(*message, connection.bytes_of_part, index);
            notice.tag = Part{Kind::OfTransfer, connection.generation, number, static_cast<std::uint32_t>(count),
                              static_cast<std::uint32_t>(index)}
                             .tag();
            notice.data = data.data();
            notice.length = data.size();
        }
        const auto move = operation == NIXL_WRITE ? fabricast_agent_put : fabricast_agent_get;
        fabricast_token token = 0;
        if (move(agent_, list.route->handle(), list.blocks.data(), list.blocks.size(), message ? &notice : nullptr,
                 &token) != FABRICAST_OK)
            return failed("a transfer with " + quoted(connection.agent));
        list.use->in_flight += 1;
        request.in_flight.push_back({token, list.use});
    }
    return message ? send(connection, Kind::OfTransfer, number, *message, request.lists.size(), count) : NIXL_SUCCESS;
}

nixl_status_t Engine::postXfer(const nixl_xfer_op_t &operation, const nixl_meta_dlist_t &, const nixl_meta_dlist_t &,
                               const std::string &, nixlBackendReqH *&handle,
                               const nixl_opt_b_args_t *options) const {
    return guarded("postXfer", [&] {
        auto *request = static_cast<Request *>(handle);
        if (!request) return NIXL_ERR_INVALID_PARAM;
        const bool has_message = options && options->hasNotif;
        if (has_message && options->notifMsg.size() > longest_message) 
            return invalid("its notification has more than " + std::to_string(longest_message) + " bytes. Shorten it");
        const std::lock_guard<std::mutex> held(state_->lock);
        if (!request->in_flight.empty() && collect(*request) == NIXL_IN_PROG) return NIXL_ERR_REPOST_ACTIVE;
        request->failure = NIXL_SUCCESS;
        request->in_flight.reserve(request->lists.size());
        request->has_message = has_message;
        const nixl_status_t status = post(operation, *request, has_message ? &options->notifMsg : nullptr);
        if (status != NIXL_SUCCESS && has_message) request->connection->name_is_sent = false;
        /* After a failure, operations that were started continue. */
        return status == NIXL_SUCCESS ? collect(*request) : status;
    });
}

nixl_status_t Engine::checkXfer(nixlBackendReqH *handle) const {
    return guarded("checkXfer", [&] {
        auto *request = static_cast<Request *>(handle);
        if (!request) return NIXL_ERR_INVALID_PARAM;
        const std::lock_guard<std::mutex> held(state_->lock);
        return collect(*request);
    });
}

/* A request in flight is not cancelled: it continues, and deregistering its memory waits for it. */
nixl_status_t Engine::releaseReqH(nixlBackendReqH *handle) const {
    return guarded("releaseReqH", [&] {
        auto *request = static_cast<Request *>(handle);
        if (!request) return NIXL_SUCCESS;
        const std::lock_guard<std::mutex> held(state_->lock);
        if (collect(*request) != NIXL_IN_PROG) {
            state_->requests.erase(request);
            delete request;
        } else {
            request->is_released = true;
            state_->released += 1;
        }
        if (state_->released > 0) collect_all();
        return NIXL_SUCCESS;
    });
}

/* Collects outcomes. A failure is reported when nothing uses the memory any more. */
nixl_status_t Engine::collect(Request &request) const {
    while (!request.in_flight.empty()) {
        const Operation &operation = request.in_flight.back();
        std::uint64_t is_over = 0;
        const fabricast_status status = fabricast_agent_test(agent_, operation.token, &is_over, nullptr);
        if (status == FABRICAST_OK && !is_over) {
            /* The threads of the fabric may have no other core than that of a program that polls. */
            std::this_thread::yield();
            return NIXL_IN_PROG;
        }
        operation.use->in_flight -= 1;
        if (status != FABRICAST_OK) operation.use->has_failed = true;
        request.in_flight.pop_back();
        if (status != FABRICAST_OK) {
            /* The receiver would wait for its part: later messages are of another generation. */
            if (request.has_message) request.connection->name_is_sent = false;
            const nixl_status_t failure = failed("a transfer with " + quoted(request.connection->agent));
            if (request.failure == NIXL_SUCCESS) request.failure = failure;
        }
    }
    return request.failure;
}

void Engine::collect_all() const {
    auto &all = state_->requests;
    for (auto next = all.begin(); next != all.end();) {
        Request *request = *next;
        const bool is_over = request->in_flight.empty() || collect(*request) != NIXL_IN_PROG;
        if (is_over && request->is_released) {
            next = all.erase(next);
            state_->released -= 1;
            delete request;
        } else {
            ++next;
        }
    }
}

} // namespace fabricast_nixl
