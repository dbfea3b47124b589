/* What NIXL calls when it loads libplugin_FABRICAST.so. */

#include <new>

#include "backend/backend_plugin.h"

#include "engine.hpp"
#include "log.hpp"
#include "settings.hpp"

namespace {

nixlBackendEngine *create_engine(const nixlBackendInitParams *parameters) {
    try {
        return new fabricast_nixl::Engine(parameters);
    } catch (const std::exception &error) {
        fabricast_nixl::log(fabricast_nixl::Level::Error, error.what());
        return nullptr;
    }
}

void destroy_engine(nixlBackendEngine *engine) { delete engine; }
const char *plugin_name() { return "FABRICAST"; }
const char *plugin_version() { return fabricast_version(); }
nixl_b_params_t backend_options() { return fabricast_nixl::default_parameters(); }
nixl_mem_list_t backend_mems() { return {DRAM_SEG, VRAM_SEG}; }

} // namespace

extern "C" NIXL_PLUGIN_EXPORT nixlBackendPlugin *nixl_plugin_init() {
    static nixlBackendPlugin plugin = {NIXL_PLUGIN_API_VERSION, create_engine,   destroy_engine, plugin_name,
                                       plugin_version,          backend_options, backend_mems};
    return &plugin;
}

extern "C" NIXL_PLUGIN_EXPORT void nixl_plugin_fini() {}
