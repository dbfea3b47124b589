/* Messages are complete and in order, in whatever order their parts arrive; hostile senders only harm themselves. */

#include "message.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>

using namespace fabricast_nixl;

#define CHECK(condition)                                                                \
    do {                                                                                \
        if (!(condition)) {                                                             \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);        \
            std::exit(1);                                                               \
        }                                                                               \
    } while (0)

namespace {

struct Notice {
    std::uint64_t tag;
    std::string data;
};

std::mt19937 numbers(20261129);

std::size_t below(std::size_t end) { return std::uniform_int_distribution<std::size_t>(0, end - 1)(numbers); }

Identity identity(std::uint8_t number) {
    Identity identity{};
    identity[0] = number;
    return identity;
}

std::string random_text(std::size_t length) {
    std::string text(length, '\0');
    for (char &byte : text) byte = static_cast<char>(below(256));
    return text;
}

void cut(std::vector<Notice> &notices, Kind kind, std::uint8_t generation, std::uint32_t number,
         const std::string &text, std::size_t bytes, std::size_t least = 1) {
    const std::size_t count = parts_of(text.size(), bytes, least);
    for (std::size_t index = 0; index < count; index++)
        notices.push_back({Part{kind, generation, number, static_cast<std::uint32_t>(count),
                                static_cast<std::uint32_t>(index)}
                               .tag(),
                           std::string(part_of(text, bytes, index))});
}

void add(Inbox &inbox, const Identity &from, const std::vector<Notice> &notices) {
    for (const Notice &notice : notices) CHECK(inbox.add(from, notice.tag, notice.data).empty());
}

void tags_are_read_as_written() {
    for (int round = 0; round < 1000; round++) {
        const auto count = static_cast<std::uint32_t>(below(Part::most) + 1);
        const Part part{static_cast<Kind>(below(3) + 1), static_cast<std::uint8_t>(below(256)),
                        static_cast<std::uint32_t>(below(Part::numbers)), count,
                        static_cast<std::uint32_t>(below(count))};
        Part read{};
        CHECK(Part::read(part.tag(), read));
        CHECK(read.kind == part.kind && read.generation == part.generation && read.number == part.number &&
              read.count == part.count && read.index == part.index);
    }
    Part read{};
    CHECK(!Part::read(0, read));
    CHECK(!Part::read(Part{Kind::Name, 0, 0, 2, 2}.tag(), read));
}

void parts_in_any_order_become_the_messages_in_order() {
    for (int round = 0; round < 200; round++) {
        const std::size_t bytes = below(2) ? 64 : 4096;
        const std::string name = random_text(below(200) + 1);
        std::vector<Notice> notices;
        Messages sent;
        cut(notices, Kind::Name, 7, 0, name, bytes);
        for (std::uint32_t number = 0; number < 20; number++) {
            sent.emplace_back(name, random_text(below(10) ? below(300) : below(10000)));
            cut(notices, Kind::Ordered, 7, number, sent.back().second, bytes);
        }
        std::shuffle(notices.begin(), notices.end(), numbers);
        Inbox inbox;
        inbox.joined(identity(1));
        add(inbox, identity(1), notices);
        Messages received;
        inbox.take(received);
        CHECK(received == sent);
    }
}

void message_of_a_transfer_needs_a_notice_of_each_operation() {
    Inbox inbox;
    std::vector<Notice> notices, message;
    cut(notices, Kind::Name, 0, 0, "sender", 64);
    add(inbox, identity(1), notices);
    cut(message, Kind::OfTransfer, 0, 5, "short", 64, 3);
    CHECK(message.size() == 3 && message[0].data == "short" && message[2].data.empty());
    Messages received;
    std::shuffle(message.begin(), message.end(), numbers);
    for (const Notice &notice : message) {
        inbox.take(received);
        CHECK(received.empty());
        CHECK(inbox.add(identity(1), notice.tag, notice.data).empty());
    }
    inbox.take(received);
    CHECK((received == Messages{{"sender", "short"}}));
}

void numbers_wrap() {
    Inbox inbox;
    Messages received;
    std::vector<Notice> notices;
    cut(notices, Kind::Name, 0, 0, "sender", 64);
    for (std::uint32_t number = 0; number < Part::numbers + 10; number++)
        cut(notices, Kind::Ordered, 0, number % Part::numbers, "x", 64);
    add(inbox, identity(1), notices);
    inbox.take(received);
    CHECK(received.size() == Part::numbers + 10);
}

void connections_of_a_sender_are_kept_apart() {
    Inbox inbox;
    Messages received;
    std::vector<Notice> first, second;
    cut(first, Kind::Name, 0, 0, "sender", 64);
    cut(first, Kind::Ordered, 0, 0, std::string(100, 'a'), 64);
    cut(second, Kind::Name, 1, 0, "sender", 64);
    cut(second, Kind::Ordered, 1, 0, "b", 64);
    inbox.joined(identity(1));
    first.pop_back();
    add(inbox, identity(1), first);
    /* The new connection is reported before the end of the old one. */
    inbox.joined(identity(1));
    add(inbox, identity(1), second);
    inbox.left(identity(1));
    second.clear();
    cut(second, Kind::Ordered, 1, 1, "c", 64);
    add(inbox, identity(1), second);
    inbox.take(received);
    CHECK((received == Messages{{"sender", "b"}, {"sender", "c"}}));
    inbox.left(identity(1));
    CHECK(inbox.senders() == 0);
}

void sender_that_breaks_the_rules_is_ignored() {
    const auto refused = [](const std::vector<Notice> &notices) {
        Inbox inbox;
        Messages received;
        std::vector<Notice> others;
        cut(others, Kind::Name, 0, 0, "other", 64);
        add(inbox, identity(2), others);
        std::size_t refusals = 0;
        for (const Notice &notice : notices) refusals += !inbox.add(identity(1), notice.tag, notice.data).empty();
        others.clear();
        cut(others, Kind::Ordered, 0, 0, "fine", 64);
        add(inbox, identity(2), others);
        inbox.take(received);
        CHECK((received == Messages{{"other", "fine"}}));
        return refusals == 1;
    };
    const std::uint64_t first = Part{Kind::Ordered, 0, 0, 3, 0}.tag();
    CHECK(refused({{0, ""}, {0, ""}}));
    CHECK(refused({{first, "a"}, {first, "b"}, {first, "c"}}));
    CHECK(refused({{first, "a"}, {Part{Kind::Ordered, 0, 0, 4, 1}.tag(), "b"}}));
    CHECK(refused({{Part{Kind::Ordered, 0, Part::numbers - 1, 1, 0}.tag(), "old"}}));
    CHECK(refused({{Part{Kind::OfTransfer, 0, 0, 3, 0}.tag(), std::string(longest_message + 1, 'a')}}));
    CHECK(refused({{Part{Kind::Name, 0, 0, 2, 0}.tag(), std::string(longest_name + 1, 'a')}}));
    std::vector<Notice> many;
    for (std::uint32_t number = 0; number < Part::numbers; number++)
        many.push_back({Part{Kind::OfTransfer, 0, number, 2, 0}.tag(), std::string(200, 'a')});
    CHECK(refused(many));
    many.clear();
    for (std::uint32_t number = 0; number < Part::numbers; number++)
        many.push_back({Part{Kind::Ordered, 0, number, 1, 0}.tag(), std::string(200, 'a')});
    CHECK(refused(many));
}

void random_notices_do_no_harm() {
    Inbox inbox;
    Messages received;
    for (int round = 0; round < 200000; round++) {
        const std::uint64_t kind = below(4), generation = below(20), number = below(8), count = below(4), index = below(4);
        const std::uint64_t tag = kind << 62 | generation << 54 | number << 36 | count << 18 | index;
        const Identity sender = identity(static_cast<std::uint8_t>(below(4)));
        switch (below(50)) {
            case 0: inbox.joined(sender); break;
            case 1: inbox.left(sender); break;
            default: inbox.add(sender, tag, std::string(below(65), 'x'));
        }
    }
    inbox.take(received);
}

} // namespace

int main() {
    tags_are_read_as_written();
    parts_in_any_order_become_the_messages_in_order();
    message_of_a_transfer_needs_a_notice_of_each_operation();
    numbers_wrap();
    connections_of_a_sender_are_kept_apart();
    sender_that_breaks_the_rules_is_ignored();
    random_notices_do_no_harm();
    std::puts("ok");
}
