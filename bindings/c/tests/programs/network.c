/* Options of a node's network that cannot work are errors when the node is joined. */
#include "check.h"

#include <rgaps.h>

static uint32_t agreed = 1;

static fabricast_status attempt(const char *listen, const char *peers, const char *provider)
{
    fabricast_node_options options;
    fabricast_node *node;
    fabricast_status status;

    DONE(fabricast_node_options_init(&options, sizeof options));
    options.service_timeout = FABRICAST_SECONDS(60);
    options.listen = listen;
    options.peers = peers;
    options.provider = provider;
    options.insecure = agreed;
    status = fabricast_node_join(&options, &node);
    if (status == FABRICAST_OK)
        DONE(fabricast_node_leave(node));
    else
        CHECK(node == NULL);
    return status;
}

/* The name of an available provider, from the error about an unknown one. */
static void any(char *name, size_t size)
{
    const char *start;
    size_t length;

    EXPECT(FABRICAST_E_NO_PROVIDER, attempt("127.0.0.1:0", NULL, "=no-such-provider"));
    start = strstr(fabricast_error_message(), "the providers are ");
    CHECK(start != NULL);
    start += strlen("the providers are ");
    length = strcspn(start, ",");
    CHECK(length > 0 && length < size);
    memcpy(name, start, length);
    name[length] = 0;
}

int main(void)
{
    char name[100], policy[102], topic_name[] = "network";

    alarm(300);
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, attempt(NULL, "nowhere", NULL));
    CHECK(strstr(fabricast_error_message(), "not like host:port") != NULL);
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, attempt(NULL, "127.0.0.1:1,127.0.0.1:0", NULL));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, attempt("127.0.0.1", NULL, NULL));
    agreed = 0;
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, attempt("127.0.0.1:0", NULL, NULL));
    CHECK(strstr(fabricast_error_message(), "insecure") != NULL);
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, attempt(NULL, "192.0.2.1:7007", NULL));
    agreed = 1;
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, attempt("127.0.0.1:0", NULL, "^"));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, attempt("127.0.0.1:0", NULL, "net,^net"));

    EXPECT(FABRICAST_E_INVALID_ARGUMENT, attempt(NULL, NULL, "net"));
    CHECK(strstr(fabricast_error_message(), "provider has no effect without listen") != NULL);

    any(name, sizeof name);
    EXPECT(FABRICAST_OK, attempt("127.0.0.1:0", NULL, name));
    snprintf(policy, sizeof policy, "=%s", name);
    EXPECT(FABRICAST_OK, attempt("127.0.0.1:0", NULL, policy));
    snprintf(policy, sizeof policy, "^%s", name);
    CHECK(attempt("127.0.0.1:0", NULL, policy) != FABRICAST_E_INVALID_ARGUMENT);
    EXPECT(FABRICAST_OK, attempt("127.0.0.1:0", NULL, "^no-such-provider"));

    /* Variables of the environment are checked, too. */
    CHECK(setenv("FABRICAST_PROVDER", "net", 1) == 0);
    CHECK(publisher_init(topic_name) == NULL);
    CHECK(fabricast_error_status() == FABRICAST_E_INVALID_ARGUMENT);
    CHECK(strstr(fabricast_error_message(), "the nearest variable is FABRICAST_PROVIDER") != NULL);
    CHECK(unsetenv("FABRICAST_PROVDER") == 0);
    CHECK(setenv("FABRICAST_PEERS", "nowhere", 1) == 0);
    CHECK(publisher_init(topic_name) == NULL);
    CHECK(fabricast_error_status() == FABRICAST_E_INVALID_ARGUMENT);
    CHECK(fabricast_open_handles() == 0);
    puts("network: ok");
    return 0;
}
