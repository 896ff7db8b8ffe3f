/* A preloaded library that lets chosen file operations of a process fail.
 *
 * Operations that change something below a folder are counted, in Python and in libraries. The
 * n-th one fails with an errno, or the n-th and all after it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[4096];
static atomic_long count;
static long first, last;
static int code;

/* From now on count, and let operations first to last fail with code (first=0: none). */
void faults_arm(const char *below, long from, long to, int number) {
  folder[0] = 0;
  first = from, last = to, code = number;
  count = 0;
  strncpy(folder, below, sizeof folder - 1);
}

long faults_count(void) { return count; }

static int fails(const char *path) {
  if (!folder[0] || !path || strncmp(path, folder, strlen(folder))) return 0;
  long now = ++count;
  if (!first || now < first || now > last) return 0;
  errno = code;
  return 1;
}

static int file_fails(int fd) {
  char link[64], path[4096];
  if (!folder[0]) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return fails(path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define ON_FILE(type, name, given, passed) \
  type name given { return file_fails(fd) ? -1 : REAL(name) passed; }
#define ON_PATH(name, given, passed) \
  int name given { return fails(path) ? -1 : REAL(name) passed; }
#define OPENING(name, given, passed)                            \
  int name given {                                              \
    mode_t mode = 0;                                            \
    if (flags & (O_CREAT | O_TMPFILE)) {                        \
      va_list more;                                             \
      va_start(more, flags);                                    \
      mode = va_arg(more, mode_t);                              \
      va_end(more);                                             \
      if (fails(path)) return -1;                               \
    }                                                           \
    return REAL(name) passed;                                   \
  }

ON_FILE(ssize_t, write, (int fd, const void *data, size_t n), (fd, data, n))
ON_FILE(ssize_t, writev, (int fd, const struct iovec *v, int n), (fd, v, n))
ON_FILE(ssize_t, pwrite, (int fd, const void *data, size_t n, off_t at), (fd, data, n, at))
ON_FILE(ssize_t, pwrite64, (int fd, const void *data, size_t n, off64_t at), (fd, data, n, at))
ON_FILE(int, ftruncate, (int fd, off_t size), (fd, size))
ON_FILE(int, ftruncate64, (int fd, off64_t size), (fd, size))
ON_FILE(int, fsync, (int fd), (fd))
ON_FILE(int, fdatasync, (int fd), (fd))
ON_PATH(mkdir, (const char *path, mode_t mode), (path, mode))
ON_PATH(mkdirat, (int fd, const char *path, mode_t mode), (fd, path, mode))
ON_PATH(rename, (const char *path, const char *to), (path, to))
ON_PATH(renameat, (int fd, const char *path, int other, const char *to), (fd, path, other, to))
ON_PATH(unlink, (const char *path), (path))
ON_PATH(rmdir, (const char *path), (path))
OPENING(open, (const char *path, int flags, ...), (path, flags, mode))
OPENING(open64, (const char *path, int flags, ...), (path, flags, mode))
OPENING(openat, (int fd, const char *path, int flags, ...), (fd, path, flags, mode))
OPENING(openat64, (int fd, const char *path, int flags, ...), (fd, path, flags, mode))
