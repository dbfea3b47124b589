/*
  * raw_fabric: the C reference benchmark. The same exchanges that the library makes, with libfabric
  * alone, so that the cost of a layer above can be separated from that of libfabric.
 *
 *   cc -O2 -o raw_fabric raw_fabric.c $(pkg-config --cflags --libs libfabric)
 *   raw_fabric --provider shm --op writedata --mode lat --size 64 --iters 100000 --cores 0,1 --json
 *
  * Two processes, one RDM endpoint each, one completion queue for everything, busy-polled. The
  * initiator is the parent, the target its child; they are forked before the first libfabric call
  * because providers do not survive a fork.
 *
 * lat  writedata, write, send: ping-pong, a sample is half a round trip.
 *      read: a sample is the whole operation, from the post to its completion.
  * bw   `window` operations in flight, each with its own slot; the clock stops when the target has
  *      acknowledged the last message (for read, when the last completion is read).
 *      Percentiles are then per-operation averages over batches of `window` operations.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() __asm__ volatile("yield")
#endif

enum { INITIATOR, TARGET };
enum op { WRITEDATA, WRITE, READ, SEND };
static const char *const op_names[] = {"writedata", "write", "read", "send", NULL};
static const char *const mode_names[] = {"lat", "bw", NULL};
static const char *const threading_names[] = {"safe", "domain", "completion", NULL};
static const enum fi_threading threading_values[] = {FI_THREAD_SAFE, FI_THREAD_DOMAIN, FI_THREAD_COMPLETION};

static struct {
	const char *provider, *node;
	int op, bandwidth, threading, core[2];
	unsigned pauses;	/* after a poll without completion: polls delay the peers of some providers */
	bool inject;	/* post with fi_inject_* up to the provider's inject size: without completion */
	uint64_t iterations, warmup, window;
	size_t size;
} option = {.provider = "shm", .size = 64, .iterations = 10000, .warmup = UINT64_MAX, .window = 16, .core = {-1, -1}};

#define SECOND UINT64_C(1000000000)
/* Seconds without progress of either side: give up. Huge messages show no progress in flight. */
#define STALL_LIMIT (10 + (unsigned)(option.size >> 27))
#define STUCK_LIMIT (STALL_LIMIT + 20)	/* seconds inside one libfabric call: give up */
#define WINDOW_BYTES (UINT64_C(64) << 20)

/* An operation owns the context, which libfabric may write until it has completed. */
struct operation {
	struct fi_context2 context;	/* first: a completion's op_context is the operation */
	bool busy;
	uint64_t sequence, taken;	/* of a receive: the message it will get, and the last one it got */
};

static int side, sock, child;
static _Atomic uint64_t *shared_events;	/* [2]: events of each side, for the deadline of the other */
static const char *waiting_for = "the other process";
static volatile sig_atomic_t termination_requested;

static struct fi_info *info;
static struct fid_fabric *fabric;
static struct fid_domain *domain;
static struct fid_av *av;
static struct fid_cq *cq;
static struct fid_ep *ep;
static struct fid_mr *mr;
static void *desc;			/* NULL unless the provider requires FI_MR_LOCAL */
static fi_addr_t peer;

/* One registered region: `slots` to send from, `slots` to receive into, a page for the rest. */
static unsigned char *memory;
static size_t slots, stride, memory_size;
static uint64_t peer_base, peer_key;
static size_t receive_count;
static struct operation *transmit, *receive, notice_out, notice_in;

static uint64_t sent, arrived, notices, immediate_sum, bad, events, polls;
static uint64_t receives_posted, used_head, used_tail;
static size_t *used;			/* a ring of the completed receives to post again */

static unsigned char *tx_slot(size_t slot) { return memory + slot * stride; }
static unsigned char *rx_slot(size_t slot) { return memory + (slots + slot) * stride; }
static unsigned char *control_page(void) { return memory + 2 * slots * stride; }

static uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

/* Ends the target: SIGTERM first, since SIGKILL would leave its file in /dev/shm. */
static void end_child(void)
{
	if (child <= 0)
		return;
	kill(child, SIGTERM);
	for (int i = 0; i < 100; i++, usleep(10000))
		if (waitpid(child, NULL, WNOHANG) != 0)
			return;
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
}

static _Noreturn void die(const char *format, ...)
{
	char text[512];
	va_list list;
	va_start(list, format);
	vsnprintf(text, sizeof text, format, list);
	va_end(list);
	fprintf(stderr, "raw_fabric %s: %s\n", side == INITIATOR ? "initiator" : "target", text);
	if (side == INITIATOR)
		end_child();
	/* shm leaves its file in /dev/shm if it is not closed, and may hang in that without its peer.
	 * Other providers are not closed: ofi_rxm crashes then with large writes in flight. */
	alarm(2);
	if (ep && strcmp(option.provider, "shm") == 0)
		fi_close(&ep->fid);
	exit(1);
}

static void must(long rc, const char *what)
{
	if (rc < 0)
		die("%s: %s (%ld)", what, fi_strerror((int)-rc), rc);
}

/* A call that never returns: after a peer was killed with a lock in shared memory. */
static void stuck(int signal_number)
{
	static const char text[] = "raw_fabric: stuck inside one libfabric call\n";
	(void)signal_number;
	if (write(STDERR_FILENO, text, sizeof text - 1) < 0) { }
	if (side == INITIATOR && child > 0) {
		kill(child, SIGKILL);
		waitpid(child, NULL, 0);
	}
	_exit(1);
}

static void request_termination(int signal_number) { termination_requested = signal_number; }

/* Reports how the target exited, if it does within this time. */
static void check_child(unsigned milliseconds)
{
	int status;
	if (side != INITIATOR || child <= 0)
		return;
	for (pid_t ended; (ended = waitpid(child, &status, WNOHANG)) != child; milliseconds--) {
		if (ended < 0 || milliseconds == 0)
			return;
		usleep(1000);
	}
	child = 0;
	if (WIFSIGNALED(status))
		die("the target was killed by signal %d", WTERMSIG(status));
	if (WEXITSTATUS(status) != 0)
		die("the target failed with status %d", WEXITSTATUS(status));
}

/* The rare part of every wait: deadlines and exits. A side that only serves (the target of reads)
 * has no events for long, so the deadline considers events of *either* side. */
static void tick(void)
{
	static uint64_t ticked, seen = UINT64_MAX, changed;
	uint64_t t = now(), done;
	if (t - ticked < SECOND / 10)
		return;
	ticked = t;
	alarm(STUCK_LIMIT);
	if (termination_requested)
		die("terminated by signal %d", (int)termination_requested);
	check_child(0);
	atomic_store_explicit(&shared_events[side], events, memory_order_relaxed);
	done = events + atomic_load_explicit(&shared_events[!side], memory_order_relaxed);
	if (done != seen) {
		seen = done;
		changed = t;
	} else if (t - changed > STALL_LIMIT * SECOND) {
		die("no progress for %u s, waiting for %s (sent %" PRIu64 ", arrived %" PRIu64 ")",
		    STALL_LIMIT, waiting_for, sent, arrived);
	}
}

/* The payload is "touched": the sender stamps both ends with the sequence number before every
 * operation and the receiver checks both; messages below 16 bytes consist of stamps. */
static void stamp(unsigned char *message, uint64_t sequence)
{
	if (option.size < 16) {
		memset(message, (int)(sequence & 0xff), option.size);
		return;
	}
	memcpy(message, &sequence, 8);
	memcpy(message + option.size - 8, &sequence, 8);
}

static uint64_t load(const unsigned char *from)
{
	uint64_t value;
	atomic_signal_fence(memory_order_acquire);	/* another process writes here: read it again */
	memcpy(&value, from, 8);
	return value;
}

static bool stamped(const unsigned char *message, uint64_t sequence)
{
	if (option.size >= 16)	/* the end first: once it has arrived, the rest has, too */
		return load(message + option.size - 8) == sequence && load(message) == sequence;
	atomic_signal_fence(memory_order_acquire);
	for (size_t i = 0; i < option.size; i++)
		if (message[i] != (sequence & 0xff))
			return false;
	return true;
}

/* In a stream the writer may be some windows ahead, so the slot may hold a later stamp. */
static bool stamped_or_later(const unsigned char *message, uint64_t sequence)
{
	if (option.size < 16)
		return true;	/* one byte is not enough; the check at the end is */
	uint64_t last = load(message + option.size - 8), first = load(message);
	return first >= sequence && last >= sequence && (first - sequence) % slots == 0 && (last - sequence) % slots == 0;
}

/* The stamp of the target's slots for reads; never 0, which the initiator writes before a read. */
static uint64_t read_stamp(size_t slot) { return slot % 255 + 1; }

/* Both sides have the same pattern in their transmit slots, so each can verify received data. */
static void fill(unsigned char *message, size_t slot)
{
	uint64_t value = slot + 1;
	for (size_t i = 0; i < option.size; i += 8) {
		value = value * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
		memcpy(message + i, &value, option.size - i < 8 ? option.size - i : 8);
	}
}

static bool body_intact(size_t slot, size_t pattern)
{
	return option.size <= 16 || memcmp(rx_slot(slot) + 8, tx_slot(pattern) + 8, option.size - 16) == 0;
}

static void queue_failed(ssize_t rc)
{
	struct fi_cq_err_entry error = {0};
	char text[256];
	if (rc != -FI_EAVAIL)
		must(rc, "fi_cq_read");
	must(fi_cq_readerr(cq, &error, 0), "fi_cq_readerr");
	const char *detail = fi_cq_strerror(cq, error.prov_errno, error.err_data, text, sizeof text);
	die("an operation failed: %s (%d), provider error: %s (%d), flags %#" PRIx64 ", waiting for %s",
	    fi_strerror(error.err), error.err, detail ? detail : "nothing", error.prov_errno, error.flags, waiting_for);
}

static void handle(const struct fi_cq_tagged_entry *entry)
{
	struct operation *operation = entry->op_context;
	if ((entry->flags & FI_REMOTE_CQ_DATA) && !(entry->flags & (FI_RECV | FI_WRITE | FI_SEND))) {
		/* The immediate of a write of the peer: op_context is undefined, len may be 0. FI_WRITE has
		 * to be clear because sockets sets FI_REMOTE_CQ_DATA at the writer, too. */
		arrived++;
		immediate_sum += entry->data;
		if (!option.bandwidth)
			bad += entry->data != arrived;	/* ping-pong: one at a time, in order */
		else if (entry->data == 0 || !stamped_or_later(rx_slot((entry->data - 1) % slots), entry->data))
			bad++;
		if (info->mode & FI_RX_CQ_DATA)	/* it consumed a receive */
			used[used_tail++ % receive_count] = (size_t)(operation - receive);
	} else if (!(entry->flags & FI_RECV)) {
		operation->busy = false;
	} else if (operation == &notice_in) {
		notices++;
	} else {
		size_t slot = (size_t)(operation - receive);
		arrived++;
		bad += entry->len != option.size || !stamped(rx_slot(slot), operation->sequence);
		operation->taken = operation->sequence;
		used[used_tail++ % receive_count] = slot;
	}
}

static inline void progress(void)
{
	struct fi_cq_tagged_entry entries[16];
	ssize_t count = fi_cq_read(cq, entries, 16);
	if (count > 0) {
		for (ssize_t i = 0; i < count; i++)
			handle(&entries[i]);
		events += (uint64_t)count;
	} else if (count != -FI_EAGAIN && count != 0) {
		queue_failed(count);
	} else {
		for (unsigned i = 0; i < option.pauses; i++)
			PAUSE();
	}
	if (++polls % 64 == 0)	/* one poll may move megabytes */
		tick();
}

/* A full queue is not an error: space returns as completions are read. */
#define POST(call, what) do {						\
		ssize_t rc;						\
		while ((rc = (call)) == -FI_EAGAIN) {			\
			waiting_for = "space to post (" what ")";	\
			progress();					\
		}							\
		must(rc, what);						\
	} while (0)

static void post(size_t slot)
{
	struct operation *op = &transmit[slot];
	unsigned char *from = tx_slot(slot);
	size_t size = option.size;
	uint64_t to = peer_base + (slots + slot) * stride;
	op->busy = !option.inject;
	switch (option.op) {
	case WRITEDATA:
		if (option.inject)
			POST(fi_inject_writedata(ep, from, size, sent, peer, to, peer_key), "fi_inject_writedata");
		else
			POST(fi_writedata(ep, from, size, desc, sent, peer, to, peer_key, op), "fi_writedata");
		break;
	case WRITE:
		if (option.inject)
			POST(fi_inject_write(ep, from, size, peer, to, peer_key), "fi_inject_write");
		else
			POST(fi_write(ep, from, size, desc, peer, to, peer_key, op), "fi_write");
		break;
	case READ:
		op->busy = true;
		POST(fi_read(ep, rx_slot(slot), size, desc, peer, peer_base + slot * stride, peer_key, op), "fi_read");
		break;
	case SEND:
		if (option.inject)
			POST(fi_inject(ep, from, size, peer), "fi_inject");
		else
			POST(fi_send(ep, from, size, desc, peer, op), "fi_send");
		break;
	}
}

/* The n-th posted receive gets the n-th message (FI_ORDER_SAS). Where immediates consume receives,
 * the buffers stay empty. */
static void post_receive(size_t slot)
{
	bool message = option.op == SEND;
	receive[slot].sequence = ++receives_posted;
	POST(fi_recv(ep, message ? rx_slot(slot) : control_page(), message ? option.size : 0, desc,
		     FI_ADDR_UNSPEC, &receive[slot]), "fi_recv");
}

static inline void post_used_receives(void)
{
	while (used_head < used_tail)
		post_receive(used[used_head++ % receive_count]);
}

/* An eight-byte message outside of the measured exchange: end, or acknowledgement. */
static void send_notice(void)
{
	notice_out.busy = true;
	POST(fi_send(ep, control_page(), 8, desc, peer, &notice_out), "fi_send");
	waiting_for = "a notice to be sent";
	while (notice_out.busy)
		progress();
}

static void await_notice(const char *what)
{
	static uint64_t awaited;
	awaited++;
	waiting_for = what;
	while (notices < awaited)
		progress();
}

/* Waits until both sides have called it. Drives the endpoint meanwhile, since the other side may
 * need that; the target of reads stays here, so the socket is polled rarely. */
static void meet(void)
{
	char byte = 0;
	if (send(sock, &byte, 1, MSG_NOSIGNAL) != 1)
		die("the other process has exited");
	for (;;) {
		waiting_for = "the other side to reach the barrier";
		ssize_t n = recv(sock, &byte, 1, MSG_DONTWAIT);
		if (n == 1)
			break;
		if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
			check_child(1000);
			die("the other process has exited");
		}
		for (int i = 0; i < 256; i++)
			progress();
	}
	events++;
}

static void exchange(const void *local, void *received, size_t size)
{
	if (send(sock, local, size, MSG_NOSIGNAL) != (ssize_t)size ||
	    recv(sock, received, size, MSG_WAITALL) != (ssize_t)size) {
		check_child(1000);
		die("the other process has exited or does not answer");
	}
}

/* Waits for the peer's message and checks it, and for this side's last operation on its slot. */
static inline void await_message(size_t slot, uint64_t sequence)
{
	waiting_for = "the peer's message";
	if (option.op == WRITE) {	/* without completion: poll the memory */
		while (!stamped(rx_slot(0), sequence) || transmit[0].busy)
			progress();
		return;
	}
	while (arrived < sequence || transmit[slot].busy)
		progress();
	if (option.op == WRITEDATA)	/* a receive was checked at its completion */
		bad += !stamped(rx_slot(0), sequence);
}

static void drain(void)
{
	waiting_for = "the last completions";
	for (size_t slot = 0; slot < slots; slot++)
		while (transmit[slot].busy)
			progress();
}

/* Ping-pong, or successive reads. The clock is read once an iteration. */
static void latency_initiator(uint64_t count, uint64_t *samples)
{
	uint64_t before = now();
	for (uint64_t i = 0; i < count; i++) {
		uint64_t sequence = ++sent;
		size_t slot = option.op == SEND ? (sequence - 1) % slots : 0;
		if (option.op == READ)
			stamp(rx_slot(0), 0);
		else
			stamp(tx_slot(slot), sequence);
		post(slot);
		post_used_receives();	/* after the send: other receives are posted, this one is not urgent */
		if (option.op == READ) {
			waiting_for = "a read";
			while (transmit[0].busy)
				progress();
			bad += !stamped(rx_slot(0), read_stamp(0));
		} else {
			await_message(slot, sequence);
		}
		uint64_t after = now();
		if (samples)
			samples[i] = after - before;
		before = after;
	}
}

static void latency_target(uint64_t count)
{
	for (uint64_t i = 0; i < count && option.op != READ; i++) {
		uint64_t sequence = ++sent;
		size_t slot = option.op == SEND ? (sequence - 1) % slots : 0;
		await_message(slot, sequence);
		stamp(tx_slot(slot), sequence);
		post(slot);
		post_used_receives();
	}
}

/* Returns the elapsed time; samples, if not NULL, gets a duration for each window but the first. */
static uint64_t stream_initiator(uint64_t count, uint64_t *samples)
{
	uint64_t start = now(), before = start;
	for (uint64_t i = 0; i < count; i++) {
		size_t slot = sent++ % slots;
		waiting_for = "a slot of the window";
		while (transmit[slot].busy)
			progress();
		if (option.op == READ) {
			bad += sent > slots && !stamped(rx_slot(slot), read_stamp(slot));
			stamp(rx_slot(slot), 0);
		} else {
			stamp(tx_slot(slot), sent);
		}
		post(slot);
		if (samples && (i + 1) % slots == 0) {
			uint64_t after = now();
			if (i + 1 > slots)
				*samples++ = after - before;
			before = after;
		}
	}
	drain();
	if (option.op == WRITE)
		send_notice();	/* otherwise the target is not notified of the end: one byte has only 256 stamps */
	if (option.op != READ)
		await_notice("the target to acknowledge");
	return now() - start;
}

/* The highest sequence number up to `sent` of this slot; 0 when it was never used. */
static uint64_t last_of(size_t slot)
{
	return sent > slot ? slot + 1 + (sent - slot - 1) / slots * slots : 0;
}

static void stream_target(uint64_t count)
{
	if (option.op == READ)
		return;		/* it serves, in meet() */
	sent += count;		/* what the initiator will have sent */
	if (option.op == WRITE)
		await_notice("the end of the stream");
	waiting_for = "the stream";
	for (size_t slot = 0; option.op == WRITE && slot < slots; slot++)
		while (last_of(slot) && !stamped(rx_slot(slot), last_of(slot)))
			progress();
	while (option.op != WRITE && arrived < sent) {
		progress();
		post_used_receives();
	}
	send_notice();
}

static uint64_t run(uint64_t count, uint64_t *samples)
{
	uint64_t elapsed = 0;
	if (option.bandwidth && (side == INITIATOR ? option.op != READ : option.op == WRITE))
		POST(fi_recv(ep, control_page() + 64, 64, desc, FI_ADDR_UNSPEC, &notice_in), "fi_recv");
	meet();
	for (uint64_t t = now(); side == INITIATOR && now() - t < SECOND / 1000;)
		progress();	/* the target may leave meet() a little later: not on the clock */
	if (!option.bandwidth)
		side == INITIATOR ? latency_initiator(count, samples) : latency_target(count);
	else if (side == INITIATOR)
		elapsed = stream_initiator(count, samples);
	else
		stream_target(count);
	drain();
	meet();
	return elapsed;
}

/* After the clock has stopped: verifies every byte of every receive slot. */
static void check_everything(void)
{
	if (option.op == READ ? side == TARGET : option.bandwidth && side == INITIATOR)
		return;
	for (size_t slot = 0; slot < slots && slot < sent; slot++) {
		uint64_t expected = option.op == READ ? read_stamp(slot) : option.op == SEND ? receive[slot].taken : last_of(slot);
		bad += !stamped(rx_slot(slot), expected);
		bad += !body_intact(slot, option.op == SEND ? (expected - 1) % slots : slot);
	}
	if (option.op == WRITEDATA && option.bandwidth)
		bad += immediate_sum != sent * (sent + 1) / 2;
}

/* The hint "tcp" also matches "tcp;ofi_rxm": the name must be equal. */
static struct fi_info *find_provider(uint32_t version, uint64_t order)
{
	struct fi_info *hints = fi_allocinfo(), *list = NULL, *found = NULL;
	if (!hints)
		die("fi_allocinfo: out of memory");
	hints->caps = FI_MSG | FI_RMA;
	hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
	hints->ep_attr->type = FI_EP_RDM;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
	hints->domain_attr->threading = threading_values[option.threading];
	/* Both sides poll: a provider's progress thread would only take the core away
	 * (sockets, two cores, 64 bytes: 7 microseconds one way with this hint, 7 milliseconds without). */
	hints->domain_attr->data_progress = hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
	hints->tx_attr->msg_order = hints->rx_attr->msg_order = order;
	hints->fabric_attr->prov_name = strdup(option.provider);

	/* shm names its file after the process id. After a killed process with the same id, fi_enable
	 * fails with EBUSY, so use a unique name. */
	char name[64];
	const char *node = option.node;
	if (!node && strcmp(option.provider, "shm") == 0) {
		snprintf(name, sizeof name, "raw_fabric-%d-%" PRIx64, (int)getpid(), now());
		node = name;
	}
	if (!node && (!strncmp(option.provider, "tcp", 3) || !strncmp(option.provider, "net", 3) ||
		      !strncmp(option.provider, "udp", 3) || !strncmp(option.provider, "sockets", 7)))
		node = "127.0.0.1";
	int rc = fi_getinfo(version, node, NULL, node ? FI_SOURCE : 0, hints, &list);
	if (rc && rc != -FI_ENODATA)
		must(rc, "fi_getinfo");
	for (struct fi_info *at = list; at && !found; at = at->next)
		if (strcmp(at->fabric_attr->prov_name, option.provider) == 0)
			found = fi_dupinfo(at);
	fi_freeinfo(list);
	fi_freeinfo(hints);
	return found;
}

static void open_endpoint(void)
{
	uint32_t version = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION);
	if (FI_VERSION_LT(fi_version(), version))
		version = fi_version();

	/* Without a hint for order some providers guarantee none (shm in exchange for addresses). */
	uint64_t order = FI_ORDER_WAW | FI_ORDER_SAW | (option.op == SEND ? FI_ORDER_SAS : 0);
	info = find_provider(version, order);
	if (!info && (info = find_provider(version, 0)))
		fprintf(stderr, "raw_fabric: %s does not guarantee the requested order\n", option.provider);
	if (!info)
		die("libfabric has no provider \"%s\" with reliable datagrams, RMA and this threading level", option.provider);
	if (option.op == WRITEDATA && info->domain_attr->cq_data_size < 4)
		die("%s has no immediate of 32 bits (cq_data_size %zu)", option.provider, info->domain_attr->cq_data_size);
	if (option.size > info->ep_attr->max_msg_size)
		die("%s transfers at most %zu bytes at once", option.provider, info->ep_attr->max_msg_size);

	if (option.size > info->tx_attr->inject_size)
		option.inject = false;

	struct fi_cq_attr cq_attr = {.size = slots * 4 < 256 ? 256 : slots * 4, .format = FI_CQ_FORMAT_TAGGED, .wait_obj = FI_WAIT_NONE};
	struct fi_av_attr av_attr = {.type = FI_AV_TABLE, .count = 2};
	must(fi_fabric(info->fabric_attr, &fabric, NULL), "fi_fabric");
	must(fi_domain(fabric, info, &domain, NULL), "fi_domain");
	must(fi_cq_open(domain, &cq_attr, &cq, NULL), "fi_cq_open");
	must(fi_av_open(domain, &av_attr, &av, NULL), "fi_av_open");
	must(fi_endpoint(domain, info, &ep, NULL), "fi_endpoint");
	must(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind(cq)");
	must(fi_ep_bind(ep, &av->fid, 0), "fi_ep_bind(av)");
	must(fi_enable(ep), "fi_enable");
}

static void prepare_memory(void)
{
	stride = (option.size + 63) / 64 * 64;	/* small slots do not share cache lines */
	memory_size = 2 * slots * stride + 4096;
	memory = mmap(NULL, memory_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (memory == MAP_FAILED)
		die("mmap of %zu bytes: %s", memory_size, strerror(errno));
	for (size_t slot = 0; slot < slots; slot++) {
		fill(tx_slot(slot), slot);
		if (option.op == READ && side == TARGET)
			stamp(tx_slot(slot), read_stamp(slot));
	}

	int mr_mode = info->domain_attr->mr_mode;
	uint64_t access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
	must(fi_mr_reg(domain, memory, memory_size, access, 0, 0x1000u + (unsigned)side, 0, &mr, NULL), "fi_mr_reg");
	if (mr_mode & FI_MR_ENDPOINT) {
		must(fi_mr_bind(mr, &ep->fid, 0), "fi_mr_bind");
		must(fi_mr_enable(mr), "fi_mr_enable");
	}
	if (mr_mode & FI_MR_LOCAL)
		desc = fi_mr_desc(mr);

	receive_count = option.op == SEND ? slots : info->mode & FI_RX_CQ_DATA ? 2 * slots + 16 : 0;
	transmit = calloc(slots, sizeof *transmit);
	receive = calloc(receive_count + 1, sizeof *receive);
	used = calloc(receive_count + 1, sizeof *used);
	if (!transmit || !receive || !used)
		die("out of memory");
}

static void connect_peer(void)
{
	struct hello { uint64_t base, key, address_size; char address[488]; } local = {0}, remote;
	size_t size = sizeof local.address;
	must(fi_getname(&ep->fid, local.address, &size), "fi_getname");
	local.address_size = size;
	local.base = info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)memory : 0;
	local.key = fi_mr_key(mr);
	exchange(&local, &remote, sizeof local);
	peer_base = remote.base;
	peer_key = remote.key;
	if (fi_av_insert(av, remote.address, 1, &peer, 0, NULL) != 1)
		die("fi_av_insert rejected the peer's address");
	if (!option.bandwidth || side == TARGET)
		for (size_t slot = 0; slot < receive_count; slot++)
			post_receive(slot);
}

static int compare(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return (x > y) - (x < y);
}

static void report(uint64_t *samples, uint64_t count, uint64_t elapsed, bool verified)
{
	/* Half a round trip of a ping-pong, all of a read, the share of one in a batch of a stream. */
	double share = option.bandwidth ? 1.0 / (double)slots : option.op == READ ? 1.0 : 0.5;
	static const char *const names[] = {"p50_us", "p99_us", "p999_us"};
	static const double quantiles[] = {0.5, 0.99, 0.999};
	double median = 0;
	qsort(samples, count, sizeof *samples, compare);
	putchar('{');
	for (int i = 0; i < 3; i++) {
		if (count == 0) {
			printf("\"%s\":null,", names[i]);
			continue;
		}
		double ns = (double)samples[(uint64_t)(quantiles[i] * (double)(count - 1) + 0.5)] * share;
		median = i == 0 ? ns : median;
		printf("\"%s\":%.4f,", names[i], ns / 1e3);
	}
	double rate = option.bandwidth ? (double)option.size * (double)option.iterations / (double)elapsed : (double)option.size / median;
	printf("\"gb_per_s\":%.4f,\"bytes\":%zu,\"iterations\":%" PRIu64 ",\"provider\":\"%s\",\"waiting\":\"spin\",",
	       rate, option.size, option.iterations, info->fabric_attr->prov_name);
	if (option.core[0] >= 0)
		printf("\"cores\":[%d,%d],", option.core[0], option.core[1]);
	else
		printf("\"cores\":null,");
	printf("\"verified\":%s,\"threading\":\"%s\",\"libfabric\":\"%s\",\"program\":\"raw C\"}\n", verified ? "true" : "false",
	       threading_names[option.threading], fi_tostr("", FI_TYPE_VERSION));
}

static void close_everything(void)
{
	struct fid *fids[] = {&ep->fid, &mr->fid, &cq->fid, &av->fid, &domain->fid, &fabric->fid};
	for (size_t i = 0; i < sizeof fids / sizeof *fids; i++)
		must(fi_close(fids[i]), "fi_close");
	fi_freeinfo(info);
	munmap(memory, memory_size);
	free(transmit);
	free(receive);
	free(used);
}

static _Noreturn void usage(const char *problem)
{
	fprintf(stderr, "raw_fabric: %s\nusage: raw_fabric --provider P --op writedata|write|read|send --mode lat|bw --size N[K|M|G]\n"
		"  --iters N [--cores A,B] [--threading safe|domain|completion] [--warmup N] [--window N] [--inject] [--pauses N] [--node ADDRESS] --json\n", problem);
	exit(2);
}

static uint64_t number(const char *text)
{
	char *end;
	errno = 0;
	uint64_t value = strtoull(text, &end, 10);
	int shift = *end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0;
	if (errno || end == text || *text == '-' || end[shift != 0] || value > (UINT64_C(1) << 40) >> shift)
		usage("invalid or too large number");
	return value << shift;
}

static int choice(const char *text, const char *const *names)
{
	for (int i = 0; names[i]; i++)
		if (strcmp(text, names[i]) == 0)
			return i;
	usage(text);
}

static void parse(int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
		if (strcmp(name, "--json") == 0)
			continue;	/* there is no other output */
		if (strcmp(name, "--inject") == 0) {
			option.inject = true;
			continue;
		}
		if (!value)
			usage(name);
		i++;
		if (!strcmp(name, "--provider")) option.provider = value;
		else if (!strcmp(name, "--node")) option.node = value;
		else if (!strcmp(name, "--op")) option.op = choice(value, op_names);
		else if (!strcmp(name, "--mode")) option.bandwidth = choice(value, mode_names);
		else if (!strcmp(name, "--threading")) option.threading = choice(value, threading_names);
		else if (!strcmp(name, "--size")) option.size = number(value);
		else if (!strcmp(name, "--iters")) option.iterations = number(value);
		else if (!strcmp(name, "--warmup")) option.warmup = number(value);
		else if (!strcmp(name, "--window")) option.window = number(value);
		else if (!strcmp(name, "--pauses")) option.pauses = (unsigned)number(value);
		else if (strcmp(name, "--cores") || sscanf(value, "%d,%d", &option.core[0], &option.core[1]) != 2 ||
			 option.core[0] < 0 || option.core[1] < 0)
			usage(name);
	}
	if (!option.size || !option.iterations || !option.window || option.iterations > UINT32_MAX / 4)
		usage("size, iterations and window must be at least 1, iterations at most 2^30");
	if (option.warmup == UINT64_MAX)
		option.warmup = option.iterations / 10 + 1 < 1000 ? option.iterations / 10 + 1 : 1000;
	if (option.warmup > UINT32_MAX / 4)
		usage("too much warmup");	/* the sequence number must fit an immediate of 32 bits */

	uint64_t most = WINDOW_BYTES / ((option.size + 63) / 64 * 64);
	slots = option.bandwidth ? option.window : option.op == SEND ? 4 : 1;
	slots = slots > most ? most : slots;
	if (slots < 1)
		slots = 1;
	if (!option.bandwidth && option.op == SEND && slots < 2)
		slots = 2;	/* one receive is posted while the other's message is checked */
}

int main(int argc, char **argv)
{
	parse(argc, argv);
	int pair[2];
	struct timeval timeout = {.tv_sec = STALL_LIMIT};
	shared_events = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared_events == MAP_FAILED || socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
		die("cannot create the socket pair or the shared memory: %s", strerror(errno));
	pid_t parent = getpid();
	child = fork();
	if (child < 0)
		die("fork: %s", strerror(errno));
	side = child == 0 ? TARGET : INITIATOR;
	sock = pair[side];
	close(pair[!side]);
	setsockopt(sock, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
	signal(SIGALRM, stuck);
	signal(SIGTERM, request_termination);
	signal(SIGINT, request_termination);
	alarm(STUCK_LIMIT);
	if (side == TARGET) {
		prctl(PR_SET_PDEATHSIG, SIGTERM);	/* does not outlive the initiator */
		if (getppid() != parent)
			exit(1);
	}
	if (option.core[side] >= 0) {
		cpu_set_t set;
		CPU_ZERO(&set);
		CPU_SET((unsigned)option.core[side], &set);
		if (sched_setaffinity(0, sizeof set, &set))
			die("pin to core %d failed: %s", option.core[side], strerror(errno));
	}

	open_endpoint();
	prepare_memory();
	connect_peer();
	uint64_t *samples = side == INITIATOR ? calloc(option.iterations, sizeof *samples) : NULL;
	if (side == INITIATOR && !samples)
		die("out of memory");
	if (option.warmup)
		run(option.warmup, NULL);
	uint64_t elapsed = run(option.iterations, samples);
	check_everything();

	uint64_t bad_remote;
	exchange(&bad, &bad_remote, sizeof bad);
	if (side == INITIATOR) {
		uint64_t windows = option.iterations / slots;
		if (bad + bad_remote)
			fprintf(stderr, "raw_fabric: %" PRIu64 " checks failed at the initiator, %" PRIu64 " at the target\n", bad, bad_remote);
		check_child(STALL_LIMIT * 1000);
		if (child)
			die("the target does not exit");
		report(samples, option.bandwidth ? (windows ? windows - 1 : 0) : option.iterations, elapsed, bad + bad_remote == 0);
	}
	free(samples);
	close_everything();
	return 0;
}
