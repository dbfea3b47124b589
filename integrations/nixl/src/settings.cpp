#include "settings.hpp"

#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include <sys/stat.h>
#include <unistd.h>

#include "log.hpp"

namespace fabricast_nixl {
namespace {

const char *const none = "none";
/* An hour. */
constexpr double longest_seconds = 3600;
constexpr unsigned long most_rails = 8;

[[noreturn]] void refuse(const std::string &name, const std::string &value, const std::string &remedy) {
    throw std::invalid_argument("parameter \"" + name + "\" is \"" + value + "\". " + remedy);
}

fabricast_timeout seconds(const std::string &name, const std::string &value) {
    char *end = nullptr;
    const double number = std::strtod(value.c_str(), &end);
    if (value.empty() || *end != '\0' || !(number > 0) || number > longest_seconds)
        refuse(name, value, "Use a number of seconds above 0, at most 3600");
    const fabricast_timeout time = static_cast<fabricast_timeout>(std::llround(number * 1e9));
    return time > 0 ? time : 1;
}

std::uint32_t count_of_rails(const std::string &name, const std::string &value) {
    char *end = nullptr;
    const unsigned long number = std::strtoul(value.c_str(), &end, 10);
    if (value.empty() || *end != '\0' || value[0] == '-' || number < 1 || number > most_rails)
        refuse(name, value, "Use a number from 1 to 8");
    return static_cast<std::uint32_t>(number);
}

/* The default directory of this user. It is only used if no other user can put files there. */
std::string own_directory() {
    const char *runtime = std::getenv("XDG_RUNTIME_DIR");
    const std::string user = std::to_string(::geteuid());
    const std::string path = runtime && *runtime == '/' ? std::string(runtime) + "/fabricast-nixl"
                                                        : "/tmp/fabricast-nixl-" + user;
    if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST)
        throw std::invalid_argument("directory " + path + " cannot be created: " + std::strerror(errno) +
                                    ". Set the parameter \"directory\"");
    struct stat found;
    if (::lstat(path.c_str(), &found) != 0 || !S_ISDIR(found.st_mode) || found.st_uid != ::geteuid() ||
        (found.st_mode & (S_IWGRP | S_IWOTH)) != 0)
        throw std::invalid_argument(path + " is not a directory of this user alone. Remove it, or set the "
                                           "parameter \"directory\"");
    return path;
}

} // namespace

const Parameters &default_parameters() {
    static const Parameters parameters = [] {
        Parameters all = {
            {"directory", ""}, {"fabric", "auto"},  {"source", ""},   {"policy", ""},
            {"rails", "1"},    {"lost_after", "5"}, {"timeout", "10"},
        };
        for (auto &[name, value] : all) {
            std::string variable = "NIXL_FABRICAST_" + name;
            for (char &letter : variable) letter = static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
            const char *set = std::getenv(variable.c_str());
            if (set && *set) value = set;
        }
        return all;
    }();
    return parameters;
}

Settings Settings::read(const Parameters &parameters) {
    Parameters all = default_parameters();
    for (const auto &[name, value] : parameters) {
        const auto known = all.find(name);
        if (known == all.end())
            log(Level::Warn, "parameter \"" + name + "\" is unknown, and is ignored");
        else if (!value.empty())
            known->second = value;
        if (value.find('\0') != std::string::npos) refuse(name, value, "Use a text without zero bytes");
    }
    Settings settings;
    const std::string &directory = all["directory"];
    if (directory.empty())
        settings.directory = own_directory();
    else if (directory != none)
        settings.directory = directory;
    if (all["fabric"] != none) settings.fabric = all["fabric"];
    settings.source = all["source"];
    settings.policy = all["policy"];
    settings.rails = count_of_rails("rails", all["rails"]);
    settings.lost_after = seconds("lost_after", all["lost_after"]);
    settings.timeout = seconds("timeout", all["timeout"]);
    return settings;
}

} // namespace fabricast_nixl
