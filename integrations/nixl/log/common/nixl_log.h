/*
 * What NIXL's backend headers use of its logging, without Abseil: the plug-in writes its own log
 * (src/log.hpp), and does not use these macros.
 */
#ifndef FABRICAST_NIXL_LOG_H
#define FABRICAST_NIXL_LOG_H

#include <ostream>
#include <string>

namespace fabricast_nixl {

inline std::ostream &discarded() {
    thread_local std::ostream stream(nullptr);
    return stream;
}

} // namespace fabricast_nixl

#define NIXL_FATAL fabricast_nixl::discarded()
#define NIXL_PFATAL fabricast_nixl::discarded()
#define NIXL_ERROR fabricast_nixl::discarded()
#define NIXL_PERROR fabricast_nixl::discarded()
#define NIXL_ERROR_FUNC fabricast_nixl::discarded()
#define NIXL_WARN fabricast_nixl::discarded()
#define NIXL_PWARN fabricast_nixl::discarded()
#define NIXL_INFO fabricast_nixl::discarded()
#define NIXL_PINFO fabricast_nixl::discarded()
#define NIXL_DEBUG fabricast_nixl::discarded()
#define NIXL_PDEBUG fabricast_nixl::discarded()
#define NIXL_TRACE fabricast_nixl::discarded()
#define NIXL_PTRACE fabricast_nixl::discarded()
#define NIXL_ASSERT(condition) fabricast_nixl::discarded()
#define NIXL_ASSERT_ALWAYS(condition) fabricast_nixl::discarded()

#endif
