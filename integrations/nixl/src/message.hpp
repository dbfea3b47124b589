/*
 * Messages of any length between agents, in notices of at most FABRICAST_MAX_NOTICE bytes.
 *
 * A message is cut into parts, each the data of one notice; the notice's tag says which part of
 * which message it is. A message is complete when all parts have arrived, in any order. So each of
 * several operations of a transfer carries a part, which arrives after its data, and the message
 * arrives after the data of all.
 *
 * The parts of a message of a transfer belong together by a number. Other messages are numbered
 * without gaps, and are delivered in that order. The first message of a connection is the name of
 * its sender. Each connection of a sender has another generation, so that messages of the previous
 * one are not taken for its own.
 */
#ifndef FABRICAST_NIXL_SRC_MESSAGE_HPP
#define FABRICAST_NIXL_SRC_MESSAGE_HPP

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fabricast_nixl {

/* Bytes of the longest message, and of the longest name of an agent. */
constexpr std::size_t longest_message = 1 << 20;
constexpr std::size_t longest_name = 4096;

enum class Kind : std::uint8_t { Name = 1, Ordered = 2, OfTransfer = 3 };

/* What the tag of a notice says. */
struct Part {
    Kind kind;
    std::uint8_t generation;
    std::uint32_t number; /* of the message */
    std::uint32_t count;  /* of its parts */
    std::uint32_t index;  /* of this part, from 0 on */

    static constexpr unsigned number_bits = 18;
    static constexpr std::uint32_t numbers = 1u << number_bits;
    /* The most parts of a message. */
    static constexpr std::uint32_t most = 1u << number_bits;

    std::uint64_t tag() const;
    /* False for a tag that is none of ours. */
    static bool read(std::uint64_t tag, Part &part);
};

/* Number of parts of a message with this many bytes in each, but at least as many as given. */
std::size_t parts_of(std::size_t length, std::size_t bytes_of_part, std::size_t least);

/* The bytes of a part; empty behind the end of the message. */
std::string_view part_of(std::string_view message, std::size_t bytes_of_part, std::size_t index);

using Identity = std::array<std::uint8_t, 16>;
/* Names of senders and messages. */
using Messages = std::vector<std::pair<std::string, std::string>>;

/* Puts the parts of received messages together. Senders are not trusted: what is kept for each one
 * is limited, and a sender that breaks the rules is ignored until it connects again. */
class Inbox {
public:
    /* Bytes that are kept of incomplete messages of a connection, and of those that wait. */
    static constexpr std::size_t most_bytes = std::size_t{64} << 20;
    /* What a part costs beyond its bytes. */
    static constexpr std::size_t bytes_for_part = 128;
    /* Connections of one sender at a time; the oldest is forgotten. */
    static constexpr std::size_t most_streams = 8;

    void joined(const Identity &sender);
    void left(const Identity &sender);
    /* Takes a notice. Returns why the sender is ignored from now on, or an empty text. */
    std::string add(const Identity &sender, std::uint64_t tag, std::string_view data);
    /* Moves the complete messages behind those in `messages`. */
    void take(Messages &messages);
    /* Number of senders of which something is kept. */
    std::size_t senders() const { return senders_.size(); }

private:
    struct Incomplete {
        std::uint32_t count = 0;
        std::size_t bytes = 0;
        std::map<std::uint32_t, std::string> parts;

        bool is_complete() const { return parts.size() == count; }
        std::string text() const;
    };

    /* The messages of a connection. */
    struct Stream {
        std::uint8_t generation = 0;
        bool is_ignored = false;
        bool has_name = false;
        std::string name;
        Incomplete name_parts;
        std::map<std::uint32_t, Incomplete> ordered;
        std::uint32_t next = 0;
        std::map<std::uint32_t, Incomplete> of_transfers;
        /* Complete messages of a sender whose name has not arrived. */
        std::vector<std::string> nameless;
        std::size_t bytes = 0;
    };

    struct Sender {
        std::size_t connections = 0;
        std::deque<Stream> streams; /* the oldest first */
    };

    const char *add_part(Stream &stream, const Part &part, std::string_view data);
    void deliver(Stream &stream, std::string &&text);

    std::map<Identity, Sender> senders_;
    Messages complete_;
};

} // namespace fabricast_nixl

#endif
