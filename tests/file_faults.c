/* Counts the file operations of a programme below one folder, notes each in a log, and lets one of them fail.

   A library of calls that take the place of libc's would miss those that do without it, such as the rename of
   safetensors. So the kernel is told (seccomp) to hand each system call of the list below back to this process as the
   signal SIGSYS, and the handler makes the call itself, or fails. Loaded with LD_PRELOAD it also serves processes that
   the programme starts, if FILE_FAULTS names the folder.

   FOLDER.plan   struct plan, shared by all processes: what shall happen, and how many operations there were
   FOLDER.log    struct record, path, and data or second path, for every operation, in their order
*/
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

enum operation { OPEN = 1, WRITE, TRUNCATE, SYNC, CHANGE_MODE, MAKE_FOLDER, REMOVE, RENAME, LINK, SYMLINK };
enum fault { NONE, KILL, FAIL_ONCE, DISK_FULL };

struct plan {
    int64_t fault, at;  /* at: the number of the operation, from 1 */
    int64_t reads;      /* whether opening a file to read it, or a folder, counts */
    int64_t count, lock;
};

struct record {
    int64_t operation, result, node, number, path_length, data_length; /* number: offset, length or flags */
};

static const int calls[] = {
    SYS_openat, SYS_write, SYS_pwrite64, SYS_writev, SYS_ftruncate, SYS_fsync, SYS_fdatasync, SYS_fchmod, SYS_fchmodat,
    SYS_mkdirat, SYS_unlinkat, SYS_renameat, SYS_renameat2, SYS_linkat, SYS_symlinkat,
#ifdef SYS_open /* x86 has those of earlier days, too */
    SYS_open, SYS_creat, SYS_chmod, SYS_mkdir, SYS_unlink, SYS_rmdir, SYS_rename, SYS_link, SYS_symlink,
#endif
};
enum { CALLS = sizeof calls / sizeof *calls, OUR_OWN = 0x2b3c4d5e, FOR_WRITING = O_WRONLY | O_RDWR | O_CREAT | O_TRUNC };

static char folder[4096];
static struct plan *plan;
static int log_file = -1;

/* The sixth argument, which none of these calls has, tells the kernel that this one is not to be handed back. */
static long make_call(long number, const long *a) {
    long result = syscall(number, a[0], a[1], a[2], a[3], a[4], (long)OUR_OWN);
    return result < 0 ? -errno : result;
}
#define CALL(number, ...) make_call(number, (const long[5]){__VA_ARGS__})

static const char *name_of(long descriptor, char *path) {
    char link[64];
    snprintf(link, sizeof link, descriptor == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%ld", descriptor);
    ssize_t length = readlink(link, path, 4095);
    path[length < 0 ? 0 : length] = 0;
    return path;
}

static const char *path_at(long parent, const char *name, char *path) {
    if (name[0] == '/') return strncpy(path, name, 4095);
    name_of((int)parent, path);
    size_t length = strlen(path);
    snprintf(path + length, 4096 - length, "/%s", name);
    return path;
}

static int is_watched(const char *path) {
    size_t length = strlen(folder);
    return !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

static void note(struct record record, const char *path, const void *data) {
    record.path_length = strlen(path);
    CALL(SYS_write, log_file, (long)&record, sizeof record);
    CALL(SYS_write, log_file, (long)path, record.path_length);
    if (record.data_length) CALL(SYS_write, log_file, (long)data, record.data_length);
}

/* Whether this call shall fail, and with which result. Before that a write may do a part of its work. */
static int fails(long number, long *a, const struct record *record, const char *path, long *result) {
    enum operation operation = record->operation;
    int now = plan->count == plan->at, can_be_halved = operation == WRITE && a[2] > 1;
    if (now && can_be_halved && plan->fault != FAIL_ONCE) a[2] /= 2;
    if (plan->fault == KILL && now) {
        if (can_be_halved) make_call(number, a);
        __atomic_store_n(&plan->lock, 0, __ATOMIC_SEQ_CST);
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
    if (plan->fault == FAIL_ONCE) return *result = -EIO, now;
    if (plan->fault != DISK_FULL || plan->count < plan->at) return 0;
    if (now && can_be_halved) return 0; /* the next one fails */
    int takes_space = operation == WRITE || operation == MAKE_FOLDER || operation == LINK || operation == SYMLINK ||
                      (operation == OPEN && record->number & O_CREAT && access(path, F_OK));
    return *result = -ENOSPC, takes_space || (now && operation == SYNC);
}

static long handle(long number, long *a) {
    char path[4096] = "", second[4096] = "";
    struct record record = {0};
    struct iovec part;
    const void *data = NULL;
    long descriptor = a[0];
    switch (number) {
    case SYS_openat: record.operation = OPEN; path_at(a[0], (char *)a[1], path); record.number = a[2]; break;
    case SYS_writev: /* the first part alone: a write may be short */
        part = *(struct iovec *)a[1];
        for (long k = 1; !part.iov_len && k < a[2]; k++) part = ((struct iovec *)a[1])[k];
        return handle(SYS_write, (long[6]){a[0], (long)part.iov_base, part.iov_len});
    case SYS_write: case SYS_pwrite64: record.operation = WRITE; data = (void *)a[1]; break;
    case SYS_ftruncate: record.operation = TRUNCATE; record.number = a[1]; break;
    case SYS_fsync: case SYS_fdatasync: record.operation = SYNC; break;
    case SYS_fchmod: record.operation = CHANGE_MODE; break;
    case SYS_fchmodat: record.operation = CHANGE_MODE; path_at(a[0], (char *)a[1], path); break;
    case SYS_mkdirat: record.operation = MAKE_FOLDER; path_at(a[0], (char *)a[1], path); break;
    case SYS_unlinkat: record.operation = REMOVE; path_at(a[0], (char *)a[1], path); break;
    case SYS_renameat: case SYS_renameat2:
        record.operation = RENAME; record.number = number == SYS_renameat2 ? a[4] : 0;
        path_at(a[0], (char *)a[1], path); path_at(a[2], (char *)a[3], second); break;
    case SYS_linkat:
        record.operation = LINK; path_at(a[0], (char *)a[1], path); path_at(a[2], (char *)a[3], second); break;
    case SYS_symlinkat:
        record.operation = SYMLINK; path_at(a[1], (char *)a[2], path); strncpy(second, (char *)a[0], 4095); break;
#ifdef SYS_open
    case SYS_open: return handle(SYS_openat, (long[6]){AT_FDCWD, a[0], a[1], a[2]});
    case SYS_creat: return handle(SYS_openat, (long[6]){AT_FDCWD, a[0], O_CREAT | O_WRONLY | O_TRUNC, a[1]});
    case SYS_chmod: return handle(SYS_fchmodat, (long[6]){AT_FDCWD, a[0], a[1]});
    case SYS_mkdir: return handle(SYS_mkdirat, (long[6]){AT_FDCWD, a[0], a[1]});
    case SYS_unlink: return handle(SYS_unlinkat, (long[6]){AT_FDCWD, a[0]});
    case SYS_rmdir: return handle(SYS_unlinkat, (long[6]){AT_FDCWD, a[0], AT_REMOVEDIR});
    case SYS_rename: return handle(SYS_renameat, (long[6]){AT_FDCWD, a[0], AT_FDCWD, a[1]});
    case SYS_link: return handle(SYS_linkat, (long[6]){AT_FDCWD, a[0], AT_FDCWD, a[1]});
    case SYS_symlink: return handle(SYS_symlinkat, (long[6]){a[0], AT_FDCWD, a[1]});
#endif
    }
    if (!path[0]) name_of(descriptor, path);
    int reads = record.operation == OPEN && !(record.number & FOR_WRITING);
    if (!is_watched(path) || (reads && !plan->reads)) return make_call(number, a);

    /* One operation at a time, of all threads and processes: the log has the order in which they were done. */
    while (__atomic_exchange_n(&plan->lock, 1, __ATOMIC_SEQ_CST)) sched_yield();
    plan->count++;
    long result;
    if (!fails(number, a, &record, path, &result)) {
        result = make_call(number, a);
        if (record.operation == WRITE && result >= 0) {
            record.data_length = result;
            record.number = number == SYS_pwrite64 ? a[3] : lseek(descriptor, 0, SEEK_CUR) - result;
        }
        if (second[0]) data = second, record.data_length = strlen(second);
        struct stat status = {0};
        int is_open = record.operation == WRITE || record.operation == TRUNCATE || record.operation == SYNC;
        if (is_open || record.operation == OPEN) fstat(is_open ? descriptor : result, &status);
        else lstat(path, &status);
        record.node = status.st_ino;
        record.result = result;
        note(record, path, data);
    }
    __atomic_store_n(&plan->lock, 0, __ATOMIC_SEQ_CST);
    return result;
}

static void on_call(int signal, siginfo_t *information, void *context) {
    (void)signal;
    int before = errno;
    mcontext_t *machine = &((ucontext_t *)context)->uc_mcontext;
#if defined(__x86_64__)
    greg_t *r = machine->gregs;
    long a[6] = {r[REG_RDI], r[REG_RSI], r[REG_RDX], r[REG_R10], r[REG_R8], r[REG_R9]};
    r[REG_RAX] = handle(information->si_syscall, a);
#elif defined(__aarch64__)
    long a[6];
    for (int k = 0; k < 6; k++) a[k] = machine->regs[k];
    machine->regs[0] = handle(information->si_syscall, a);
#else
#error "where this machine keeps the arguments of a system call is not written here"
#endif
    errno = before;
}

static int hand_back_calls(void) {
    struct sock_filter filter[2 * CALLS + 16];
    int n = 0;
#define ADD(...) filter[n++] = (struct sock_filter)__VA_ARGS__
#define LOAD(field) ADD(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field)))
    LOAD(args[5]); /* the lower half: both machines are little-endian */
    ADD(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, OUR_OWN, 0, 1));
    ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    LOAD(nr);
    if (!plan->reads) { /* a process that was just started opens its libraries before it has a handler */
        ADD(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 0, 4));
        LOAD(args[2]);
        ADD(BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, FOR_WRITING, 1, 0));
        ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
        ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP));
    }
    for (int k = 0; k < CALLS; k++) {
        ADD(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, calls[k], 0, 1));
        ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP));
    }
    ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    struct sock_fprog program = {n, filter};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

/* Count from now on; returns 0 if it worked. */
int watch_folder(const char *path) {
    char name[4200];
    strncpy(folder, path, sizeof folder - 1);
    struct sigaction action = {.sa_sigaction = on_call, .sa_flags = SA_SIGINFO};
    sigfillset(&action.sa_mask);
    sigaction(SIGSYS, &action, NULL); /* first: a process that was started by another has its filter already */
    snprintf(name, sizeof name, "%s.plan", path);
    int file = open(name, O_RDWR | O_CLOEXEC);
    plan = mmap(NULL, sizeof *plan, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    snprintf(name, sizeof name, "%s.log", path);
    log_file = open(name, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || plan == MAP_FAILED || log_file < 0) return 1;
    return hand_back_calls();
}

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FILE_FAULTS");
    if (path && watch_folder(path)) {
        perror("file_faults");
        _exit(99);
    }
}
