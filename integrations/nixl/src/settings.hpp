/* The parameters of the backend. */
#ifndef FABRICAST_NIXL_SRC_SETTINGS_HPP
#define FABRICAST_NIXL_SRC_SETTINGS_HPP

#include <cstdint>
#include <string>
#include <unordered_map>

#include <fabricast.h>

namespace fabricast_nixl {

using Parameters = std::unordered_map<std::string, std::string>;

/* The names of all parameters, with their defaults, or the values of the environment variables
 * NIXL_FABRICAST_DIRECTORY and so on: many programs pass no parameters. */
const Parameters &default_parameters();

struct Settings {
    std::string directory; /* empty: no directory */
    std::string fabric;    /* empty: no fabric */
    std::string source;    /* empty: the default of the fabric */
    std::string policy;    /* empty: the best path */
    std::uint32_t rails = 1;
    fabricast_timeout lost_after = 0;
    fabricast_timeout timeout = 0;

    /* Reads parameters. A wrong value is an std::invalid_argument with name, value and remedy; an
     * unknown name is only logged, since programs pass the same parameters to all backends. */
    static Settings read(const Parameters &parameters);
};

} // namespace fabricast_nixl

#endif
