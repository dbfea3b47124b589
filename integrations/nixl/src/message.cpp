#include "message.hpp"

#include <algorithm>

namespace fabricast_nixl {
namespace {

constexpr unsigned count_shift = Part::number_bits;
constexpr unsigned number_shift = 2 * Part::number_bits;
constexpr unsigned generation_shift = 3 * Part::number_bits;
constexpr unsigned kind_shift = generation_shift + 8;
constexpr std::uint64_t mask = Part::numbers - 1;

static_assert(kind_shift == 62, "two bits for the kind");

} // namespace

std::uint64_t Part::tag() const {
    return std::uint64_t{static_cast<std::uint8_t>(kind)} << kind_shift |
           std::uint64_t{generation} << generation_shift | (number & mask) << number_shift |
           ((count - 1) & mask) << count_shift | (index & mask);
}

bool Part::read(std::uint64_t tag, Part &part) {
    const auto kind = static_cast<std::uint8_t>(tag >> kind_shift);
    if (kind < static_cast<std::uint8_t>(Kind::Name)) return false;
    part.kind = static_cast<Kind>(kind);
    part.generation = static_cast<std::uint8_t>(tag >> generation_shift);
    part.number = static_cast<std::uint32_t>(tag >> number_shift & mask);
    part.count = static_cast<std::uint32_t>(tag >> count_shift & mask) + 1;
    part.index = static_cast<std::uint32_t>(tag & mask);
    return part.index < part.count;
}

std::size_t parts_of(std::size_t length, std::size_t bytes_of_part, std::size_t least) {
    return std::max({(length + bytes_of_part - 1) / bytes_of_part, least, std::size_t{1}});
}

std::string_view part_of(std::string_view message, std::size_t bytes_of_part, std::size_t index) {
    const std::size_t start = std::min(index * bytes_of_part, message.size());
    return message.substr(start, bytes_of_part);
}

std::string Inbox::Incomplete::text() const {
    std::string text;
    text.reserve(bytes);
    for (const auto &[index, bytes_of_part] : parts) text += bytes_of_part;
    return text;
}

void Inbox::joined(const Identity &sender) { senders_[sender].connections += 1; }

void Inbox::left(const Identity &sender) {
    const auto found = senders_.find(sender);
    if (found == senders_.end()) return;
    Sender &state = found->second;
    if (state.connections > 0) state.connections -= 1;
    /* All notices of a connection are reported before its end, and older connections end first. */
    while (state.streams.size() > state.connections) state.streams.pop_front();
    if (state.connections == 0) senders_.erase(found);
}

std::string Inbox::add(const Identity &sender, std::uint64_t tag, std::string_view data) {
    Part part{};
    const bool is_ours = Part::read(tag, part);
    Sender &state = senders_[sender];
    const auto has_generation = [&](const Stream &stream) { return stream.generation == part.generation; };
    auto stream = std::find_if(state.streams.begin(), state.streams.end(), has_generation);
    if (stream == state.streams.end()) {
        if (state.streams.size() >= most_streams) state.streams.pop_front();
        stream = state.streams.emplace(state.streams.end());
        stream->generation = part.generation;
    }
    if (stream->is_ignored) return "";
    const char *cause = is_ours ? add_part(*stream, part, data) : "a notice has an unknown tag";
    if (cause == nullptr) return "";
    const std::string name = stream->has_name ? "agent \"" + stream->name + "\"" : "an agent without a name";
    *stream = Stream{};
    stream->generation = part.generation;
    stream->is_ignored = true;
    return "notifications of " + name + " are ignored until it connects again: " + cause;
}

const char *Inbox::add_part(Stream &stream, const Part &part, std::string_view data) {
    Incomplete *message = &stream.name_parts;
    if (part.kind == Kind::Name) {
        if (stream.has_name) return "its name came twice";
    } else if (part.kind == Kind::Ordered) {
        const std::uint32_t ahead = (part.number - stream.next) & static_cast<std::uint32_t>(mask);
        if (ahead >= Part::numbers / 2) return "a message that was complete has more parts";
        message = &stream.ordered[part.number];
    } else {
        message = &stream.of_transfers[part.number];
    }
    if (message->count == 0) message->count = part.count;
    if (message->count != part.count) return "parts disagree about their number";
    if (!message->parts.emplace(part.index, data).second) return "a part came twice";
    message->bytes += data.size();
    stream.bytes += data.size() + bytes_for_part;
    const std::size_t longest = part.kind == Kind::Name ? longest_name : longest_message;
    if (message->bytes > longest) return "a message is too long";
    if (stream.bytes > most_bytes) return "too many messages are incomplete";
    if (!message->is_complete()) return nullptr;

    const auto take = [&](Incomplete &taken) {
        std::string text = taken.text();
        stream.bytes -= taken.bytes + taken.parts.size() * bytes_for_part;
        taken = Incomplete{};
        return text;
    };
    switch (part.kind) {
        case Kind::Name:
            stream.name = take(*message);
            stream.has_name = true;
            for (std::string &text : stream.nameless) {
                stream.bytes -= text.size() + bytes_for_part;
                complete_.emplace_back(stream.name, std::move(text));
            }
            stream.nameless.clear();
            break;
        case Kind::OfTransfer:
            deliver(stream, take(*message));
            stream.of_transfers.erase(part.number);
            break;
        case Kind::Ordered:
            for (auto next = stream.ordered.find(stream.next);
                 next != stream.ordered.end() && next->second.is_complete();
                 next = stream.ordered.find(stream.next)) {
                deliver(stream, take(next->second));
                stream.ordered.erase(next);
                stream.next = (stream.next + 1) & static_cast<std::uint32_t>(mask);
            }
            break;
    }
    return stream.bytes > most_bytes ? "too many messages wait for its name" : nullptr;
}

void Inbox::deliver(Stream &stream, std::string &&text) {
    if (stream.has_name) {
        complete_.emplace_back(stream.name, std::move(text));
        return;
    }
    stream.bytes += text.size() + bytes_for_part;
    stream.nameless.push_back(std::move(text));
}

void Inbox::take(Messages &messages) {
    for (auto &message : complete_) messages.push_back(std::move(message));
    complete_.clear();
}

} // namespace fabricast_nixl
