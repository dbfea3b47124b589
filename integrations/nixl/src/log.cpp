#include "log.hpp"

#include <cctype>
#include <cstdlib>
#include <unistd.h>

namespace fabricast_nixl {
namespace {

/* The levels of NIXL itself; its default is WARN. */
int lowest_level() {
    const char *variable = std::getenv("NIXL_LOG_LEVEL");
    std::string name = variable ? variable : "";
    for (char &letter : name) letter = static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
    if (name == "TRACE" || name == "DEBUG") return static_cast<int>(Level::Debug);
    if (name == "INFO") return static_cast<int>(Level::Info);
    if (name == "ERROR") return static_cast<int>(Level::Error);
    if (name == "FATAL") return static_cast<int>(Level::Error) + 1;
    return static_cast<int>(Level::Warn);
}

} // namespace

bool is_logged(Level level) {
    static const int lowest = lowest_level();
    return static_cast<int>(level) >= lowest;
}

void log(Level level, const std::string &text) {
    static const char *const names[] = {"DEBUG", "INFO", "WARN", "ERROR"};
    if (!is_logged(level)) return;
    /* Text may contain what a peer sent: no control characters reach a terminal. */
    std::string printable = text;
    for (char &letter : printable)
        if (static_cast<unsigned char>(letter) < ' ' || letter == 0x7f) letter = '?';
    /* One write, so that lines of several threads are not mixed. */
    const std::string line = std::string("NIXL FABRICAST ") + names[static_cast<int>(level)] + ": " + printable + "\n";
    ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
    (void)written;
}

} // namespace fabricast_nixl
