/* Streams and events.
 *
 * Usually all work is done at once. With SOFTGPU_LATE=SEED what is written arrives late (copies, operations in place, new tensors): each
 * stream is a queue, and one thread, the device, takes the first work of a random stream. It holds half of it back, up to SOFTGPU_LATE_US
 * microseconds (50,000), until somebody waits. Whoever reads what it writes without having waited for it, on the host, on another stream or
 * in another process, reads what was there before. All other work waits for its turn in its stream and then runs on the caller's thread. */
#include "softgpu.h"

typedef struct event event_t;
typedef struct stream stream_t;
typedef struct work {
    void (*run)(void *);
    void *data;
    sg_range to, from;
    stream_t *after;         /* cudaStreamWaitEvent: not before this stream has done so much ... */
    uint64_t after_count;
    sg_shared_event *remote; /* ... or the event of another process is done */
    uint32_t remote_count;
    struct work *next;
} work_t;
struct stream {
    int priority;
    uint64_t enqueued, done;
    work_t *first, *last;
    stream_t *next;
};
struct event {
    stream_t *stream;
    uint64_t count;          /* of the stream's work, at cudaEventRecord */
    struct timespec time;
    sg_shared_event *shared; /* with an IPC handle */
    int number;
};

static stream_t default_stream, *streams = &default_stream; /* stream 0 is one of several, as torch's streams are non-blocking */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;
static unsigned seed, pause_us;
static int is_late = -1;
static int waiting; /* threads that wait for a stream: nothing is held back meanwhile */
static char lost;

void sg_delay(long number) { /* from now on by this seed; 0: at once */
    sg_drain();
    is_late = number != 0, seed = number * 7919u + 1;
    pause_us = getenv("SOFTGPU_LATE_US") ? atoi(getenv("SOFTGPU_LATE_US")) : 50000;
}
static int late(void) {
    if (is_late < 0) is_late = 0, sg_delay(getenv("SOFTGPU_LATE") ? atol(getenv("SOFTGPU_LATE")) : 0);
    return is_late;
}
static stream_t *stream_of(cudaStream_t handle) { /* 0, 1 and 2 are the default streams */
    return (uintptr_t)handle <= 2 ? &default_stream : (stream_t *)handle;
}
static int remote_done(sg_shared_event *event, uint32_t count) {
    return (int32_t)(__atomic_load_n(&event->done, __ATOMIC_SEQ_CST) - count) >= 0 || !event->pid || !sg_lives(event->pid);
}
static int ready(work_t *work) {
    if (work->after) return work->after->done >= work->after_count;
    return !work->remote || remote_done(work->remote, work->remote_count);
}

static stream_t *choose(void) { /* a random one whose first work may run */
    int count = 0;
    stream_t *chosen = 0;
    for (stream_t *stream = streams; stream; stream = stream->next)
        if (stream->first && ready(stream->first) && rand_r(&seed) % ++count == 0) chosen = stream;
    return chosen;
}
static void *device(void *unused) {
    pthread_mutex_lock(&mutex);
    for (;;) {
        int idle = !choose();
        pthread_mutex_unlock(&mutex); /* meanwhile more is enqueued, and what came last may run first */
        usleep(idle ? 50 : rand_r(&seed) % 50);
        long left = idle || rand_r(&seed) % 2 ? 0 : rand_r(&seed) % (pause_us + 1);
        for (; left > 0 && !__atomic_load_n(&waiting, __ATOMIC_SEQ_CST); left -= 50) usleep(50);
        pthread_mutex_lock(&mutex);
        stream_t *stream = choose();
        if (!stream) continue;
        work_t *work = stream->first;
        pthread_mutex_unlock(&mutex);
        if (work->run) work->run(work->data);
        pthread_mutex_lock(&mutex);
        if (!(stream->first = work->next)) stream->last = 0;
        stream->done++;
        free(work->data), free(work);
        pthread_cond_broadcast(&progress);
    }
    return 0;
}

static void append(stream_t *stream, work_t work) { /* holding the mutex */
    static char started;
    work_t *made = malloc(sizeof *made);
    *made = work;
    if (stream->last) stream->last->next = made;
    else stream->first = made;
    stream->last = made;
    stream->enqueued++;
    pthread_t thread;
    if (!started) started = !pthread_create(&thread, 0, device, 0);
}
static void wait_for(stream_t *stream, uint64_t count) {
    __atomic_add_fetch(&waiting, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_lock(&mutex);
    while (stream->done < count) pthread_cond_wait(&progress, &mutex);
    pthread_mutex_unlock(&mutex);
    __atomic_sub_fetch(&waiting, 1, __ATOMIC_SEQ_CST);
}

int sg_enqueue(cudaStream_t handle, void (*run)(void *), void *data, sg_range to, sg_range from) {
    int error = late() ? 0 : sg_launch(handle);
    if (!error && late()) {
        pthread_mutex_lock(&mutex);
        append(stream_of(handle), (work_t){.run = run, .data = data, .to = to, .from = from});
        pthread_mutex_unlock(&mutex);
        return lost ? cudaErrorLaunchFailure : 0;
    }
    if (!error) run(data);
    free(data);
    return error;
}
int sg_launch(cudaStream_t handle) {
    int error = sg_here();
    if (error) return error;
    if (sg_fails(SG_FAULT_HANG)) for (;;) pause();
    if (sg_fails(SG_FAULT_LOST)) lost = 1;
    if (lost) return sg_error(cudaErrorLaunchFailure); /* as a real one: no call of this process succeeds any more */
    stream_t *stream = stream_of(handle);
    if (late()) wait_for(stream, stream->enqueued);
    return 0;
}
void sg_drain(void) { for (stream_t *stream = streams; late() && stream; stream = stream->next) wait_for(stream, stream->enqueued); }
static int overlap(sg_range a, const char *start, size_t size) {
    return a.size && (const char *)a.start < start + size && start < (const char *)a.start + a.size;
}
void sg_drain_range(void *start, size_t size, const char *call) {
    int count = 0;
    pthread_mutex_lock(&mutex);
    for (stream_t *stream = streams; stream; stream = stream->next)
        for (work_t *work = stream->first; work; work = work->next) count += overlap(work->to, start, size) || overlap(work->from, start, size);
    pthread_mutex_unlock(&mutex);
    if (count) sg_violation("%s of %zu bytes that %d copies still use", call, size, count);
    sg_drain();
}
__attribute__((constructor)) static void set_wait(void) { sg_wait = sg_drain_range; }

/* Streams */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority) {
    int error = sg_here();
    if (error) return sg_error(error);
    stream_t *stream = calloc(1, sizeof *stream);
    stream->priority = priority;
    pthread_mutex_lock(&mutex);
    stream->next = streams, streams = stream;
    pthread_mutex_unlock(&mutex);
    *handle = (cudaStream_t)stream;
    return 0;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t handle) { return 0; } /* its work goes on; the few bytes stay, as events may name it */
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return sg_launch(stream); }
cudaError_t cudaStreamQuery(cudaStream_t handle) {
    stream_t *stream = stream_of(handle);
    return stream->done < stream->enqueued ? cudaErrorNotReady : 0; /* torch takes this one for an answer */
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = stream_of(stream)->priority; return 0; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *s) { *s = cudaStreamCaptureStatusNone; return 0; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    return 0;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return 0; }
cudaError_t cudaDeviceSynchronize(void) { int error = sg_launch(0); if (!error) sg_drain(); return error; }

/* Events */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags) {
    int error = sg_here();
    if (error) return sg_error(error);
    *handle = calloc(1, sizeof(event_t));
    return 0;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

static void finish_shared(void *data) { sg_shared_event **event = data; __atomic_add_fetch(&(*event)->done, 1, __ATOMIC_SEQ_CST); }
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
    event_t *event = (event_t *)handle;
    stream_t *stream = stream_of(stream_handle);
    clock_gettime(CLOCK_MONOTONIC, &event->time);
    pthread_mutex_lock(&mutex);
    if (event->shared) {
        __atomic_add_fetch(&event->shared->recorded, 1, __ATOMIC_SEQ_CST);
        sg_shared_event **data = malloc(sizeof *data);
        *data = event->shared;
        if (late()) append(stream, (work_t){.run = finish_shared, .data = data});
        else finish_shared(data), free(data);
    }
    event->stream = stream;
    event->count = stream->enqueued;
    pthread_mutex_unlock(&mutex);
    return 0;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaEventRecord(event, stream); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned flags) {
    event_t *event = (event_t *)handle;
    if (!late()) return 0;
    work_t work = {0};
    if (event->shared && event->shared->pid != getpid()) work.remote = event->shared, work.remote_count = event->shared->recorded;
    else if (event->stream) work.after = event->stream, work.after_count = event->count;
    else return 0;
    pthread_mutex_lock(&mutex);
    append(stream_of(stream), work);
    pthread_mutex_unlock(&mutex);
    return 0;
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
    event_t *event = (event_t *)handle;
    if (event->shared && event->shared->pid != getpid()) return remote_done(event->shared, event->shared->recorded) ? 0 : cudaErrorNotReady;
    return event->stream && event->stream->done < event->count ? cudaErrorNotReady : 0;
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    event_t *event = (event_t *)handle;
    if (event->shared && event->shared->pid != getpid()) while (cudaEventQuery(handle)) usleep(100);
    else if (event->stream) wait_for(event->stream, event->count);
    return lost ? sg_error(cudaErrorLaunchFailure) : 0;
}
cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    event_t *event = (event_t *)handle;
    if (event->shared && event->shared->pid == getpid()) event->shared->pid = 0;
    free(event);
    return 0;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    struct timespec a = ((event_t *)start)->time, b = ((event_t *)end)->time;
    *ms = (b.tv_sec - a.tv_sec) * 1e3 + (b.tv_nsec - a.tv_nsec) / 1e6;
    return 0;
}
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event_handle) {
    event_t *event = (event_t *)event_handle;
    if (!event->shared) {
        if ((event->number = sg_share_event()) < 0) return sg_error(cudaErrorMemoryAllocation);
        event->shared = sg_shared_event_at(event->number);
        if (event->stream) cudaEventRecord(event_handle, (cudaStream_t)event->stream); /* what was recorded before it had a handle */
    }
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &event->number, sizeof event->number);
    return 0;
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) {
    int number, error = cudaEventCreateWithFlags(event, 0);
    memcpy(&number, &handle, sizeof number);
    if (!error) ((event_t *)*event)->shared = sg_shared_event_at(number);
    return error;
}
