/* A libnvidia-ml.so.1 for machines without a GPU: it answers from a text file, which it reads anew at each call.
 *
 * EAGLE3_NVML_SCENARIO names the file. Its lines:
 *   gpu key=value ...          one GPU, numbered in order
 *   process gpu=0 pid=7 used=1024 [lingers=1]
 * Memory is in MiB. A process counts while it lives (a zombie does not), or always when it lingers. A GPU's memory in
 * use is its own `used` and that of its processes. Other keys of a gpu: uuid, name, total, util, ecc, pages, rows,
 * failed, recovery, mig, major (compute capability), link (bus id at the other end of its one NVLink), bus, and
 * error (an NVML error code that every question about this GPU is answered with, its handle apart).
 * Structures and codes are those of nvml.h as nvidia-ml-py 13 declares them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 2, UNSUPPORTED = 3, TOO_SMALL = 7, NOT_LOADED = 9 };
enum { MOST_GPUS = 16, MOST_PROCESSES = 64 };
#define MIB (1ULL << 20)

typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;
typedef struct { unsigned gpu, memory; } Utilisation;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned field, scope; long long time, latency; unsigned type, status; unsigned long long value; } Field;
typedef struct { char line[1024]; Process processes[MOST_PROCESSES]; unsigned count; } Gpu;

static Gpu gpus[MOST_GPUS];
static unsigned found;

static const char *text(const char *line, const char *key, char *into, size_t size) {
    char wanted[64];
    snprintf(wanted, sizeof wanted, " %s=", key);
    const char *at = strstr(line, wanted);
    if (!at) return NULL;
    at += strlen(wanted);
    size_t length = strcspn(at, " \n");
    if (length >= size) length = size - 1;
    memcpy(into, at, length);
    into[length] = 0;
    for (char *letter = into; *letter; letter++)
        if (*letter == '_') *letter = ' ';
    return into;
}

static unsigned long long number(const char *line, const char *key, unsigned long long otherwise) {
    char value[64];
    return text(line, key, value, sizeof value) ? strtoull(value, NULL, 10) : otherwise;
}

static int lives(unsigned pid) {
    char path[64], state = 'X', rest[512];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    if (fgets(rest, sizeof rest, file)) {
        const char *end = strrchr(rest, ')');
        if (end) state = end[2];
    }
    fclose(file);
    return state != 'Z' && state != 'X';
}

static int look(void) {
    const char *path = getenv("EAGLE3_NVML_SCENARIO");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return NOT_LOADED;
    char line[1024];
    found = 0;
    while (fgets(line, sizeof line, file)) {
        if (!strncmp(line, "gpu", 3) && found < MOST_GPUS) {
            strcpy(gpus[found].line, line);
            gpus[found++].count = 0;
        } else if (!strncmp(line, "process ", 8)) {
            unsigned index = number(line, "gpu", 0), pid = number(line, "pid", 0);
            if (index >= found || !(number(line, "lingers", 0) || lives(pid))) continue;
            Gpu *gpu = &gpus[index];
            if (gpu->count < MOST_PROCESSES)
                gpu->processes[gpu->count++] = (Process){pid, number(line, "used", 0) * MIB, ~0U, ~0U};
        }
    }
    fclose(file);
    return OK;
}

/* Every question about a GPU begins here; handles are numbers from 1. */
static int ask(void *handle, Gpu **gpu) {
    int status = look();
    if (status) return status;
    size_t index = (size_t)handle - 1;
    if (index >= found) return INVALID;
    *gpu = &gpus[index];
    return number((*gpu)->line, "error", OK);
}

#define ASK Gpu *gpu; int status = ask(handle, &gpu); if (status) return status

int nvmlInitWithFlags(unsigned flags) { (void)flags; return look(); }
int nvmlInit_v2(void) { return look(); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : code == 9 ? "Driver Not Loaded" : "Error"; }

int nvmlSystemGetDriverVersion(char *into, unsigned size) {
    snprintf(into, size, "0.standin");
    return OK;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    int status = look();
    *count = found;
    return status;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (look() || index >= found) return INVALID;
    *handle = (void *)(size_t)(index + 1);
    return OK;
}

int nvmlDeviceGetName(void *handle, char *into, unsigned size) {
    ASK;
    if (!text(gpu->line, "name", into, size)) snprintf(into, size, "Stand-in");
    return OK;
}

int nvmlDeviceGetUUID(void *handle, char *into, unsigned size) {
    ASK;
    if (!text(gpu->line, "uuid", into, size)) snprintf(into, size, "GPU-standin-%zu", (size_t)handle - 1);
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, Memory *memory) {
    ASK;
    unsigned long long used = number(gpu->line, "used", 0) * MIB;
    for (unsigned each = 0; each < gpu->count; each++) used += gpu->processes[each].used;
    memory->total = number(gpu->line, "total", 81920) * MIB;
    memory->reserved = 0;
    memory->used = used;
    memory->free = memory->total - used;
    return OK;
}

int nvmlDeviceGetUtilizationRates(void *handle, Utilisation *rates) {
    ASK;
    rates->gpu = number(gpu->line, "util", 0);
    rates->memory = 0;
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Process *into) {
    ASK;
    unsigned room = *count;
    *count = gpu->count;
    if (gpu->count == 0) return OK;
    if (room < gpu->count || !into) return TOO_SMALL;
    memcpy(into, gpu->processes, gpu->count * sizeof(Process));
    return OK;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, Process *into) {
    ASK;
    (void)into;
    *count = 0;
    return OK;
}

int nvmlDeviceGetTotalEccErrors(void *handle, unsigned type, unsigned counter, unsigned long long *count) {
    ASK;
    *count = type == 1 && counter == 0 ? number(gpu->line, "ecc", 0) : 0;
    return OK;
}

int nvmlDeviceGetRetiredPagesPendingStatus(void *handle, unsigned *pending) {
    ASK;
    *pending = number(gpu->line, "pages", 0);
    return OK;
}

int nvmlDeviceGetRemappedRows(void *handle, unsigned *correctable, unsigned *uncorrectable, unsigned *pending, unsigned *failed) {
    ASK;
    *correctable = *uncorrectable = 0;
    *pending = number(gpu->line, "rows", 0);
    *failed = number(gpu->line, "failed", 0);
    return OK;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *next) {
    ASK;
    *now = *next = number(gpu->line, "mig", 0);
    return OK;
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    ASK;
    *major = number(gpu->line, "major", 9);
    *minor = 0;
    return OK;
}

int nvmlDeviceGetPciInfo_v3(void *handle, Pci *pci) {
    ASK;
    memset(pci, 0, sizeof *pci);
    if (!text(gpu->line, "bus", pci->bus_id, sizeof pci->bus_id))
        snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02zX:00.0", (size_t)handle);
    return OK;
}

int nvmlDeviceGetFieldValues(void *handle, int count, Field *values) {
    ASK;
    for (int each = 0; each < count; each++) {
        values[each].status = values[each].field == 230 ? OK : UNSUPPORTED;
        values[each].value = number(gpu->line, "recovery", 0);
    }
    return OK;
}

int nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *active) {
    ASK;
    char end[32];
    if (link > 0) return INVALID;
    *active = text(gpu->line, "link", end, sizeof end) != NULL;
    return OK;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, Pci *pci) {
    ASK;
    memset(pci, 0, sizeof *pci);
    return link == 0 && text(gpu->line, "link", pci->bus_id, sizeof pci->bus_id) ? OK : INVALID;
}
