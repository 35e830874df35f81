/* What the parts of the GPU in software share. ../README.md says what it is. */
#pragma once
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "cuda_subset.h"

#define SG_DEVICES 16
#define SG_GRAIN (2ull << 20) /* memory is handed out in pieces of 2 MiB, as CUDA does */
#define SG_NAME "NVIDIA H100 80GB HBM3 (software)"

/* A range of addresses of this process that CUDA knows. */
enum sg_kind { SG_MALLOC, SG_MAPPED, SG_IPC, SG_HOST };
typedef struct sg_block {
    uintptr_t start;
    size_t size;
    enum sg_kind kind;
    int device;           /* physical */
    int fd;               /* SG_MALLOC: its memory file */
    uint64_t inode;       /* SG_MALLOC, SG_IPC: of the memory file */
    void *physical;       /* SG_MAPPED: what cuMemCreate made */
    struct sg_block *next;
} sg_block;

/* state.c: devices, and what all processes hold of them */
int sg_device_count(void);                  /* those of the machine */
int sg_visible(void);                       /* those that CUDA_VISIBLE_DEVICES leaves to this process */
int sg_physical(int index);                 /* of a visible device; -1: there is none */
uint64_t sg_total(void);
int sg_charge(int device, int64_t bytes);   /* 0, or -1: the device is full */
void sg_info(int device, uint64_t *free_bytes, uint64_t *total);
int sg_use(int device);                     /* make this process's context there; 0, or CUDA's error */
void sg_count_opening(uint64_t inode, int by);
int sg_openings(uint64_t inode);            /* how often living processes have a memory file open */
typedef struct { int32_t pid; uint32_t recorded, done; } sg_shared_event; /* an event with an IPC handle, by its owner */
int sg_share_event(void);                   /* its number; -1: too many */
sg_shared_event *sg_shared_event_at(int number);
int sg_lives(int pid);

/* streams.c: with SOFTGPU_LATE=SEED copies run late, by a thread that is the device; all else at once */
typedef struct { void *start; size_t size; } sg_range;
int sg_enqueue(cudaStream_t stream, void (*run)(void *), void *data, sg_range to, sg_range from); /* `data` is freed */
int sg_launch(cudaStream_t stream);         /* before work that runs at once: 0 when it is its turn, or CUDA's error */
void sg_drain(void);                        /* wait until all streams are done */
void sg_drain_range(void *start, size_t size, const char *call); /* the same, and say whether a copy still used it */
extern void (*sg_wait)(void *start, size_t size, const char *call); /* sg_drain_range, for the driver's library; in state.c */

/* state.c: blocks of this process */
int sg_memory_file(size_t size);
void sg_poison(void *start, size_t size);   /* with SOFTGPU_POISON: fill with NaN */
void sg_insert(sg_block block);
sg_block *sg_find(uintptr_t address);       /* the block that holds it, or NULL */
sg_block *sg_take(uintptr_t start);         /* the block that begins there, removed from the list, or NULL */
void sg_lock(void);
void sg_unlock(void);

/* state.c: reports and faults */
enum sg_fault { SG_FAULT_MALLOC, SG_FAULT_OPEN, SG_FAULT_LOST, SG_FAULT_HANG, SG_FAULTS };
int sg_fails(enum sg_fault kind);           /* count one call of this kind; 1: it has to fail */
void sg_log(const char *format, ...);       /* with SOFTGPU_VERBOSE */
void sg_violation(const char *format, ...); /* always: the program has done what CUDA forbids */
int sg_stub(const char *name);              /* say that it is not there; cudaErrorNotSupported */

int sg_error(int error);                    /* runtime.c: remember it for cudaGetLastError */
int sg_here(void);                          /* runtime.c: use this thread's device; 0, or CUDA's error */
extern __thread int sg_current; /* this thread's device, of those that are visible */
