/* Lines of the log, on standard error, from the level of NIXL_LOG_LEVEL on. */
#ifndef FABRICAST_NIXL_SRC_LOG_HPP
#define FABRICAST_NIXL_SRC_LOG_HPP

#include <string>

namespace fabricast_nixl {

enum class Level { Debug, Info, Warn, Error };

/* Is a line of this level written? */
bool is_logged(Level level);

void log(Level level, const std::string &text);

} // namespace fabricast_nixl

#endif
