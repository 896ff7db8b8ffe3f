/* Carries Ethernet frames between a host and a port of a switch, those of the host later.
 *
 *     delay MICROSECONDS PARTS_PER_MILLION PORT NAMESPACE DEVICE
 *
 * Makes the tap PORT in its own network namespace and the tap DEVICE in the one of the file
 * NAMESPACE, prints "ready" and runs until it is killed. A frame from DEVICE leaves PORT
 * MICROSECONDS later, one from PORT leaves DEVICE at once: from one host to another every frame is
 * delayed once, and lost with the given probability. While SLOTS frames are under way it takes no
 * more, so the host's queue fills.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { FRAME = 2048, SLOTS = 1 << 15 };
struct frame {
    long long due; /* ns */
    ssize_t size;
    char bytes[FRAME];
};

static long long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int fail(const char *what) {
    perror(what);
    exit(1);
}

static int tap(const char *name) {
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI};
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    if (fd < 0) fail("delay: /dev/net/tun");
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    if (ioctl(fd, TUNSETIFF, &request) < 0) fail("delay: TUNSETIFF");
    return fd;
}

/* A full receiving end drops the frame, as a switch does; TCP sends it again. */
static void put(int fd, const char *bytes, ssize_t size) {
    if (write(fd, bytes, size) < 0) return;
}

int main(int argc, char **argv) {
    static struct frame frames[SLOTS];
    static char frame[FRAME];
    unsigned head = 0, tail = 0;
    if (argc != 6)
        return fputs("usage: delay MICROSECONDS PARTS_PER_MILLION PORT NAMESPACE DEVICE\n", stderr), 2;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    long long delay = atoll(argv[1]) * 1000;
    long lost = atol(argv[2]);
    int port = tap(argv[3]);
    int other = open(argv[4], O_RDONLY);
    if (other < 0 || setns(other, CLONE_NEWNET) < 0) fail("delay: namespace");
    int device = tap(argv[5]);
    puts("ready");
    fflush(stdout);
    for (;;) {
        struct pollfd ends[] = {{device, POLLIN, 0}, {port, POLLIN, 0}};
        long long left = head == tail ? 1000000000LL : frames[head % SLOTS].due - now();
        struct timespec wait = {0, 0};
        if (left > 0) wait = (struct timespec){left / 1000000000LL, left % 1000000000LL};
        if (tail - head == SLOTS) ends[0].fd = -1;
        if (ppoll(ends, 2, &wait, NULL) < 0) fail("delay: poll");
        for (; head != tail && frames[head % SLOTS].due <= now(); head++)
            put(port, frames[head % SLOTS].bytes, frames[head % SLOTS].size);
        while (tail - head < SLOTS) {
            struct frame *slot = &frames[tail % SLOTS];
            if ((slot->size = read(device, slot->bytes, FRAME)) <= 0) break;
            slot->due = now() + delay;
            if (random() % 1000000 >= lost) tail++;
        }
        for (ssize_t size; (size = read(port, frame, FRAME)) > 0;) put(device, frame, size);
    }
}
