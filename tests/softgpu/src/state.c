/* State: what each process holds of each device, in a file that all share; the blocks of this process; faults on demand. */
#include "softgpu.h"

#define PROCESSES 512
#define OPENINGS 8192
#define SHARED_EVENTS 4096
typedef struct { int32_t pid; uint64_t started; int64_t used[SG_DEVICES]; } process_t;
typedef struct { uint64_t inode; int32_t pid, count; } opening_t;
typedef struct {
    uint32_t ready; /* 0: fresh, 1: being made, 2: made */
    pthread_mutex_t mutex;
    process_t processes[PROCESSES];
    opening_t openings[OPENINGS];
    sg_shared_event events[SHARED_EVENTS];
} state_t;

static state_t *state;
static process_t *self;
static uint64_t total_bytes, context_bytes;
static char in_use[SG_DEVICES], forked;
static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER, local = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
__thread int sg_current;
void (*sg_wait)(void *start, size_t size, const char *call);

void sg_lock(void) { pthread_mutex_lock(&local); }
void sg_unlock(void) { pthread_mutex_unlock(&local); }

/* Reports: to the file SOFTGPU_LOG, or to stderr. */

static void report(const char *kind, const char *format, va_list arguments) {
    char line[600];
    int length = snprintf(line, sizeof line, "[softgpu %d] %s", getpid(), kind);
    length += vsnprintf(line + length, sizeof line - length - 1, format, arguments);
    if (length > (int)sizeof line - 2) length = sizeof line - 2;
    line[length++] = '\n';
    const char *path = getenv("SOFTGPU_LOG");
    int fd = path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : 2;
    if (fd < 0 || write(fd, line, length) < 0) return;
    if (path) close(fd);
}
void sg_log(const char *format, ...) {
    if (!getenv("SOFTGPU_VERBOSE")) return;
    va_list arguments;
    va_start(arguments, format), report("", format, arguments), va_end(arguments);
}
void sg_violation(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format), report("VIOLATION: ", format, arguments), va_end(arguments);
}
int sg_stub(const char *name) {
    static const char *names[4096];
    static int count;
    sg_lock();
    int i = 0;
    while (i < count && strcmp(names[i], name)) i++;
    if (i == count && count < 4096) {
        names[count++] = strdup(name);
        if (getenv("SOFTGPU_VERBOSE") || getenv("SOFTGPU_STUBS")) sg_violation("%s is not implemented", name);
    }
    sg_unlock();
    return cudaErrorNotSupported;
}

/* The state that processes share. */

static uint64_t start_time(int pid) { /* in the kernel's ticks, so that a pid that is used again is told apart; 0: ended */
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0) return 0;
    text[length] = 0;
    char *at = strrchr(text, ')'); /* the name may hold spaces; the state is field 3, the time field 22 */
    if (!at || at[2] == 'Z' || at[2] == 'X') return 0;
    for (int i = 0; at && i < 20; i++) at = strchr(at + 1, ' ');
    return at ? strtoull(at, 0, 10) : 0;
}

static uint64_t bytes_of(const char *name, const char *fallback) { /* "4G", "64M" */
    char *unit;
    double number = strtod(getenv(name) ? getenv(name) : fallback, &unit);
    return number * (*unit == 'G' ? 1u << 30 : *unit == 'M' ? 1u << 20 : 1);
}

static void shared_lock(void) { /* a process that was killed with it leaves whole numbers behind */
    if (pthread_mutex_lock(&state->mutex) == EOWNERDEAD) pthread_mutex_consistent(&state->mutex);
}
static void shared_unlock(void) { pthread_mutex_unlock(&state->mutex); }

static void forget(process_t *process) {
    for (int i = 0; i < OPENINGS; i++)
        if (state->openings[i].pid == process->pid) state->openings[i] = (opening_t){0};
    for (int i = 0; i < SHARED_EVENTS; i++)
        if (state->events[i].pid == process->pid) state->events[i].pid = 0;
    memset(process, 0, sizeof *process);
}

static void map_state(void) {
    char path[256];
    const char *named = getenv("SOFTGPU_STATE");
    if (named) snprintf(path, sizeof path, "%s", named);
    else snprintf(path, sizeof path, "/dev/shm/softgpu-%d", getuid());
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(state_t))) { perror(path); abort(); }
    state = mmap(0, sizeof(state_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (state == MAP_FAILED) { perror(path); abort(); }
    uint32_t fresh = 0;
    if (__atomic_compare_exchange_n(&state->ready, &fresh, 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        pthread_mutexattr_t attributes;
        pthread_mutexattr_init(&attributes);
        pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&state->mutex, &attributes);
        __atomic_store_n(&state->ready, 2, __ATOMIC_SEQ_CST);
    }
    while (__atomic_load_n(&state->ready, __ATOMIC_SEQ_CST) != 2) usleep(1000);
}

static void after_fork(void) { /* CUDA cannot be used in the child of a process that has used it */
    for (int i = 0; i < SG_DEVICES; i++) forked |= in_use[i];
    self = 0;
}

static void setup(void) {
    pthread_mutex_lock(&once);
    if (!self) {
        if (!state) {
            total_bytes = bytes_of("SOFTGPU_MEMORY", "8G");
            context_bytes = bytes_of("SOFTGPU_CONTEXT", "64M");
            map_state();
            pthread_atfork(0, 0, after_fork);
        }
        shared_lock();
        for (int i = 0; i < PROCESSES; i++) {
            process_t *process = &state->processes[i];
            if (process->pid && start_time(process->pid) != process->started) forget(process);
            if (!process->pid && !self) self = process;
        }
        if (!self) { fprintf(stderr, "softgpu: more than %d processes use it\n", PROCESSES); abort(); }
        self->pid = getpid();
        self->started = start_time(self->pid);
        shared_unlock();
    }
    pthread_mutex_unlock(&once);
}

static int64_t used(int device) { /* of all processes that live; the memory of those that ended is free */
    int64_t sum = 0;
    for (int i = 0; i < PROCESSES; i++) {
        process_t *process = &state->processes[i];
        if (process->used[device] && process != self && start_time(process->pid) != process->started) forget(process);
        sum += process->used[device];
    }
    return sum;
}

int sg_charge(int device, int64_t bytes) {
    setup();
    shared_lock();
    int full = bytes > 0 && used(device) + bytes > (int64_t)total_bytes;
    if (!full) self->used[device] += bytes;
    shared_unlock();
    return full ? -1 : 0;
}
void sg_info(int device, uint64_t *free_bytes, uint64_t *total) {
    setup();
    shared_lock();
    int64_t sum = used(device);
    shared_unlock();
    *total = total_bytes;
    *free_bytes = sum > (int64_t)total_bytes ? 0 : total_bytes - sum;
}
int sg_use(int device) {
    if (device < 0) return cudaErrorInvalidDevice;
    if (forked) return cudaErrorInitializationError;
    setup();
    if (__atomic_exchange_n(&in_use[device], 1, __ATOMIC_SEQ_CST)) return 0;
    return sg_charge(device, context_bytes) ? cudaErrorMemoryAllocation : 0;
}
void sg_count_opening(uint64_t inode, int by) {
    setup();
    shared_lock();
    opening_t *mine = 0, *unused = 0;
    for (int i = 0; i < OPENINGS && !mine; i++) {
        opening_t *opening = &state->openings[i];
        if (opening->inode == inode && opening->pid == self->pid) mine = opening;
        else if (!opening->inode && !unused) unused = opening;
    }
    if (!mine && unused) *(mine = unused) = (opening_t){inode, self->pid, 0};
    if (mine && (mine->count += by) <= 0) *mine = (opening_t){0};
    shared_unlock();
}
int sg_openings(uint64_t inode) {
    setup();
    int sum = 0;
    shared_lock();
    for (int i = 0; i < OPENINGS; i++)
        if (state->openings[i].inode == inode && start_time(state->openings[i].pid)) sum += state->openings[i].count;
    shared_unlock();
    return sum;
}
sg_shared_event *sg_shared_event_at(int number) { setup(); return &state->events[number % SHARED_EVENTS]; }
int sg_share_event(void) {
    setup();
    shared_lock();
    int number = 0;
    while (number < SHARED_EVENTS && state->events[number].pid) number++;
    if (number < SHARED_EVENTS) state->events[number] = (sg_shared_event){self->pid, 0, 0};
    shared_unlock();
    return number < SHARED_EVENTS ? number : -1;
}
int sg_lives(int pid) { return start_time(pid) != 0; }

/* Devices. */

uint64_t sg_total(void) { setup(); return total_bytes; }
int sg_device_count(void) { return getenv("SOFTGPU_DEVICES") ? atoi(getenv("SOFTGPU_DEVICES")) : 1; }

static int visible[SG_DEVICES], visible_count = -1;
int sg_visible(void) {
    if (visible_count >= 0) return visible_count;
    const char *asked = getenv("CUDA_VISIBLE_DEVICES");
    int count = 0;
    if (!asked) for (; count < sg_device_count(); count++) visible[count] = count;
    else {
        char text[512];
        snprintf(text, sizeof text, "%s", asked);
        for (char *rest, *word = strtok_r(text, ",", &rest); word && count < SG_DEVICES; word = strtok_r(0, ",", &rest)) {
            int uuid = !strncmp(word, "GPU-", 4); /* its last two digits, in sixteens, are the device's number */
            int index = uuid ? (int)strtol(word + strlen(word) - 2, 0, 16) : atoi(word);
            if (index < 0 || index >= sg_device_count()) break; /* CUDA ignores all that follows */
            visible[count++] = index;
        }
    }
    return visible_count = count;
}
int sg_physical(int index) { return index >= 0 && index < sg_visible() ? visible[index] : -1; }

/* Blocks of this process: some hundreds, in no order. */

int sg_memory_file(size_t size) {
    int fd = memfd_create("softgpu", MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, size)) close(fd), fd = -1;
    return fd;
}
void sg_poison(void *start, size_t size) { if (getenv("SOFTGPU_POISON")) memset(start, 0xff, size); }

static sg_block *blocks;
void sg_insert(sg_block block) {
    sg_block *made = malloc(sizeof *made);
    *made = block;
    sg_lock();
    made->next = blocks, blocks = made;
    sg_unlock();
}
sg_block *sg_find(uintptr_t address) {
    sg_lock();
    sg_block *block = blocks;
    while (block && !(address >= block->start && address < block->start + block->size)) block = block->next;
    sg_unlock();
    return block;
}
sg_block *sg_take(uintptr_t start) {
    sg_lock();
    sg_block **link = &blocks;
    while (*link && (*link)->start != start) link = &(*link)->next;
    sg_block *block = *link;
    if (block) *link = block->next;
    sg_unlock();
    return block;
}

/* Faults: the n-th call of a kind in this process fails, by SOFTGPU_FAULT=KIND:N[:PART] (where PART, if there is one, is part of the
 * process's command line), or by sg_arm. */

static const char *const fault_names[SG_FAULTS] = {"malloc", "open", "lost", "hang"};
static long calls_left[SG_FAULTS];
static char faults_read;

static void read_faults(void) {
    char kind[16], part[128] = "", command[4096] = "";
    long number;
    faults_read = 1;
    const char *text = getenv("SOFTGPU_FAULT");
    if (!text || sscanf(text, "%15[^:]:%ld:%127s", kind, &number, part) < 2) return;
    int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? 0 : read(fd, command, sizeof command - 1);
    if (fd >= 0) close(fd);
    if (!memmem(command, length > 0 ? length : 0, part, strlen(part))) return;
    for (int i = 0; i < SG_FAULTS; i++) if (!strcmp(kind, fault_names[i])) calls_left[i] = number;
}
void sg_arm(const char *kind, long number) { /* the `number`-th call from now on; 0: none */
    faults_read = 1;
    for (int i = 0; i < SG_FAULTS; i++) if (!strcmp(kind, fault_names[i])) calls_left[i] = number;
}
int sg_fails(enum sg_fault kind) {
    if (!faults_read) read_faults();
    static char again; /* torch frees what it can and asks a second time */
    if (kind == SG_FAULT_MALLOC && again) return again = 0, 1;
    if (calls_left[kind] <= 0 || __atomic_sub_fetch(&calls_left[kind], 1, __ATOMIC_SEQ_CST)) return 0;
    again = kind == SG_FAULT_MALLOC;
    sg_violation("fault on demand: %s", fault_names[kind]);
    return 1;
}
