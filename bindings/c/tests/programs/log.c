/* The log is passed to a callback, or written to standard error. */
#include "check.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

struct seen {
    int lines[6];
    int is_inside; /* detects concurrent calls */
    int found;     /* lines that name the port */
    int misspelt;  /* warnings of a variable */
    char port[8];
    fabricast_status status; /* of a call within the callback */
};

static void record(int32_t level, const char *text, void *user_data)
{
    struct seen *seen = user_data;

    CHECK(level >= FABRICAST_LOG_ERROR && level <= FABRICAST_LOG_TRACE);
    CHECK(text != NULL && text[0] != 0 && strchr(text, '\n') == NULL);
    CHECK(seen->is_inside == 0);
    seen->is_inside = 1;
    seen->lines[level]++;
    seen->found += strstr(text, seen->port) != NULL;
    seen->misspelt += strstr(text, "FABRICAST_TOPIC_DEPHT is ignored") != NULL
                      && strstr(text, "The nearest setting is FABRICAST_TOPIC_DEPTH") != NULL;
    seen->status = fabricast_set_log(FABRICAST_LOG_OFF, NULL, NULL);
    seen->is_inside = 0;
}

/* Listens at a used address: that is logged as a warning or an error. */
static void listen_in_vain(const char *port)
{
    fabricast_node_options options;
    fabricast_node *node;
    char listen[32];

    snprintf(listen, sizeof listen, "127.0.0.1:%s", port);
    DONE(fabricast_node_options_init(&options, sizeof options));
    options.service_timeout = FABRICAST_SECONDS(60);
    options.listen = listen;
    options.insecure = 1;
    DONE(fabricast_node_join(&options, &node));
    DONE(fabricast_node_leave(node));
}

/* A child with this FABRICAST_LOG writes to standard error what it logs, and names the port. */
static void log_to_standard_error(const char *level, const char *port, int is_set_by_program)
{
    static char text[1 << 20];
    int is_expected = strcmp(level, "off") != 0 && !is_set_by_program;
    FILE *file = tmpfile();
    size_t length;
    pid_t child;

    CHECK(file != NULL);
    fflush(NULL);
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(setenv("FABRICAST_LOG", level, 1) == 0);
        CHECK(dup2(fileno(file), STDERR_FILENO) == STDERR_FILENO);
        if (is_set_by_program)
            DONE(fabricast_set_log(FABRICAST_LOG_OFF, NULL, NULL));
        if (strcmp(level, "loud") == 0) {
            fabricast_agent *agent;
            EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_agent_start(NULL, &agent));
            fputs(fabricast_error_message(), stderr);
        } else {
            listen_in_vain(port);
        }
        fflush(NULL);
        _exit(0);
    }
    finish(child);
    rewind(file);
    length = fread(text, 1, sizeof text - 1, file);
    text[length] = 0;
    fclose(file);
    if (strcmp(level, "loud") == 0) {
        CHECK(strstr(text, "environment FABRICAST_LOG is \"loud\". Use one of off, error") != NULL);
        return;
    }
    CHECK((strstr(text, "fabricast: ") != NULL) == is_expected);
    CHECK((strstr(text, port) != NULL) == is_expected);
    CHECK((strstr(text, "FABRICAST_TOPIC_DEPHT is ignored") != NULL) == is_expected);
    CHECK((strstr(text, "fabricast: debug: ") != NULL) == (is_expected && strcmp(level, "debug") == 0));
}

int main(void)
{
    static struct seen seen, after;
    struct sockaddr_in address;
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    pid_t child;

    alarm(300);
    CHECK(setenv("FABRICAST_TOPIC_DEPHT", "8", 1) == 0);
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(listener >= 0 && bind(listener, (struct sockaddr *)&address, sizeof address) == 0);
    CHECK(listen(listener, 1) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&address, &length) == 0);
    snprintf(seen.port, sizeof seen.port, "%d", ntohs(address.sin_port));
    after = seen;

    log_to_standard_error("warn", seen.port, 0);
    log_to_standard_error("debug", seen.port, 0);
    log_to_standard_error("off", seen.port, 0);
    log_to_standard_error("debug", seen.port, 1);
    log_to_standard_error("loud", seen.port, 0);
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_set_log(6, record, &seen));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_set_log(-1, record, &seen));
    DONE(fabricast_set_log(FABRICAST_LOG_WARN, record, &seen));
    listen_in_vain(seen.port);
    CHECK(seen.found > 0);
    CHECK(seen.misspelt == 1);
    CHECK(seen.status == FABRICAST_E_INVALID_ARGUMENT);
    CHECK(seen.lines[FABRICAST_LOG_INFO] + seen.lines[FABRICAST_LOG_DEBUG] == 0);

    /* A second callback replaces it, with more levels. */
    {
        struct seen before = seen;
        DONE(fabricast_set_log(FABRICAST_LOG_TRACE, record, &after));
        listen_in_vain(seen.port);
        CHECK(memcmp(&seen, &before, sizeof seen) == 0);
        CHECK(after.found > 0 && after.misspelt == 0);
        CHECK(after.lines[FABRICAST_LOG_INFO] + after.lines[FABRICAST_LOG_DEBUG] > 0);

        /* A child has no callback. */
        before = after;
        fflush(NULL);
        child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            listen_in_vain(seen.port);
            CHECK(memcmp(&after, &before, sizeof after) == 0);
            _exit(0);
        }
        finish(child);

        DONE(fabricast_set_log(FABRICAST_LOG_TRACE, NULL, NULL));
        before = after;
        listen_in_vain(seen.port);
        CHECK(memcmp(&after, &before, sizeof after) == 0);
    }
    close(listener);
    CHECK(fabricast_open_handles() == 0);
    puts("log: ok");
    return 0;
}
