/*
 * A libpmix whose server is this process: rank 0 of a job of three ranks, of which 0 and 1 are on
 * this machine. FAKE_PMIX lists its defects, separated by blanks.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SUCCESS 0
#define ERROR (-1)
#define TIMEOUT (-24)
#define UNREACHABLE (-25)
#define NOT_FOUND (-46)
#define PARTIAL_SUCCESS (-52)
#define LOST_CONNECTION (-61)
enum { STRING = 3, UINT16 = 13, UINT32 = 14, BYTE_OBJECT = 27 };

struct proc { char nspace[256]; uint32_t rank; };
struct value {
    uint16_t type;
    union {
        bool flag;
        char *string;
        uint16_t uint16;
        uint32_t uint32;
        struct { char *bytes; size_t size; } object;
        uint64_t words[3];
    } data;
};
struct info { char key[512]; uint32_t flags; struct value value; };
typedef void (*fence_done)(int, void *);
typedef void (*get_done)(int, struct value *, void *);

static char key[512], *stored;
static size_t length;

static bool has(const char *defect)
{
    const char *defects = getenv("FAKE_PMIX"), *found;
    size_t size = strlen(defect);
    for (; defects && (found = strstr(defects, defect)); defects = found + size)
        if ((found == defects || found[-1] == ' ') && (found[size] == ' ' || !found[size]))
            return true;
    return false;
}

/* Appends a line to the file that FAKE_PMIX_LOG names. */
static void record(const char *line)
{
    FILE *file = getenv("FAKE_PMIX_LOG") ? fopen(getenv("FAKE_PMIX_LOG"), "a") : NULL;
    if (file) {
        fprintf(file, "%s\n", line);
        fclose(file);
    }
}

static void hang(void)
{
    for (;;) pause();
}

const char *PMIx_Get_version(void)
{
    const char *version = getenv("FAKE_PMIX_VERSION");
    return version ? version : "OpenPMIx 4.2.2 (fake)";
}
const char *PMIx_Error_string(int status)
{
    return status == UNREACHABLE ? "UNREACHABLE" : has("no-texts") ? NULL : "FAKE";
}

int PMIx_Init(struct proc *own, struct info *info, size_t count)
{
    record("init");
    if (info || count) return ERROR;
    if (has("init-fails")) return UNREACHABLE;
    if (has("init-hangs")) hang();
    if (has("init-late")) sleep(1);
    memset(own, 0, sizeof *own);
    snprintf(own->nspace, sizeof own->nspace, "fake-%d", getpid());
    if (has("endless-name")) memset(own->nspace, 'x', sizeof own->nspace);
    return SUCCESS;
}
int PMIx_Finalize(const struct info *info, size_t count)
{
    (void)info, (void)count;
    record("finalize");
    if (has("finalize-hangs")) hang();
    return SUCCESS;
}
int PMIx_Put(uint8_t scope, const char *name, struct value *value)
{
    if (has("put-fails")) return ERROR;
    if (scope != 3 || value->type != BYTE_OBJECT || strncmp(name, "fabricast.", 10)) return ERROR;
    if (!strcmp(key, name)) return ERROR;
    strcpy(key, name);
    free(stored);
    length = value->data.object.size;
    stored = malloc(length + 1);
    if (length) memcpy(stored, value->data.object.bytes, length);
    return SUCCESS;
}
int PMIx_Commit(void)
{
    if (has("commit-fails")) return ERROR;
    if (has("commit-hangs")) hang();
    return SUCCESS;
}

#ifndef WITHOUT_FENCE
static fence_done fence_callback;
static void *fence_data;

static void *end_fence(void *unused)
{
    (void)unused;
    if (has("fence-late")) sleep(1);
    fence_callback(has("fence-partial") ? PARTIAL_SUCCESS : has("fence-lost") ? LOST_CONNECTION : 0,
                   fence_data);
    record("fence");
    return NULL;
}
int PMIx_Fence_nb(const struct proc *of, size_t count, const struct info *info, size_t options,
                  fence_done done, void *data)
{
    pthread_t thread;
    if (of || count || options != 1 || strcmp(info->key, "pmix.collect")) return ERROR;
    if (info->value.type != 1 || !info->value.data.flag || info->flags) return ERROR;
    if (has("fence-fails")) return ERROR;
    if (has("fence-at-once")) return -157;
    fence_callback = done, fence_data = data;
    if (has("fence-never")) return SUCCESS;
    if (pthread_create(&thread, NULL, end_fence, NULL)) return ERROR;
    pthread_detach(thread);
    return SUCCESS;
}
#endif

static int job_value(const char *name, struct value *value)
{
    value->type = UINT32;
    if (!strcmp(name, "pmix.job.size")) value->data.uint32 = has("no-ranks") ? 0 : 3;
    else if (!strcmp(name, "pmix.local.size")) value->data.uint32 = 2;
    else if (!strcmp(name, "pmix.lrank")) value->type = UINT16, value->data.uint16 = 0;
    else if (!strcmp(name, "pmix.lpeers"))
        value->type = STRING, value->data.string = strdup(has("bad-peers") ? "0,9" : "0,1");
    else return NOT_FOUND;
    return has("no-size") ? NOT_FOUND : SUCCESS;
}

/* The bytes of a rank are those of this rank, with the rank as the first byte. */
int PMIx_Get(const struct proc *of, const char *name, const struct info *info, size_t count,
             struct value **result)
{
    struct value *value = calloc(1, sizeof *value);
    if (info || count || strncmp(of->nspace, "fake-", 5)) return ERROR;
    if (!strncmp(name, "pmix.", 5)) return *result = value, job_value(name, value);
    if (strcmp(name, key)) return NOT_FOUND;
    if (has("get-hangs")) hang();
    if (has("get-misses") && of->rank == 2) return TIMEOUT;
    if (has("get-fails")) return ERROR;
    if (has("get-null")) return *result = NULL, SUCCESS;
    value->type = BYTE_OBJECT;
    value->data.object.bytes = malloc(length + 1);
    memcpy(value->data.object.bytes, stored, length);
    value->data.object.size = length;
    if (length) *value->data.object.bytes = (char)of->rank;
    if (has("get-text")) value->type = STRING, value->data.object.bytes[length] = 0;
    if (has("get-type-99")) value->type = 99;
    if (has("get-huge")) value->data.object.size = SIZE_MAX / 2;
    if (has("get-null-bytes")) value->data.object.bytes = NULL;
    return *result = value, SUCCESS;
}

struct question { struct proc of; char name[512]; bool immediate; get_done done; void *data; };

static void *answer(void *argument)
{
    struct question *question = argument;
    int status = NOT_FOUND;
    if (strcmp(question->name, key)) status = NOT_FOUND;
    else if (question->of.rank == 1) status = has("rank-1-absent") ? NOT_FOUND : SUCCESS;
    /* The other machine answers when the rank has come. */
    else if (question->immediate) status = NOT_FOUND;
    else if (has("rank-2-absent")) return NULL;
    else status = SUCCESS;
    question->done(status, NULL, question->data);
    free(question);
    return NULL;
}
int PMIx_Get_nb(const struct proc *of, const char *name, const struct info *info, size_t count,
                get_done done, void *data)
{
    pthread_t thread;
    struct question *question = calloc(1, sizeof *question);
    question->of = *of, question->done = done, question->data = data;
    question->immediate = count == 1 && !strcmp(info->key, "pmix.immediate");
    strcpy(question->name, name);
    if (has("ask-fails")) return ERROR;
    if (has("server-silent")) return SUCCESS;
    if (pthread_create(&thread, NULL, answer, question)) return ERROR;
    pthread_detach(thread);
    return SUCCESS;
}
