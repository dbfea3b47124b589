/*
 * The part of libfabric that bindgen cannot carry over by itself.
 *
 * Most of libfabric's API is `static inline`; bindgen wraps those functions.
 * What is left for this file:
 *   - structures whose shape differs between 1.17 and 2.x (anonymous unions,
 *     fields added at the end): they are filled here, in C, from structures of
 *     our own that never change;
 *   - calls through operation tables that some providers leave empty: guarded
 *     here, since calling an absent entry would be a jump to address 0;
 *   - what only newer headers know (dma-buf), answered with -FI_ENOSYS where
 *     the headers built against do not have it.
 */
#ifndef FABRICAST_SHIM_H
#define FABRICAST_SHIM_H

#include <string.h>
#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_collective.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>

/* One memory registration, in a layout that is the same for all headers. */
struct fcs_mr_request {
	const struct iovec *iov;
	size_t iov_count;
	uint64_t access;
	uint64_t offset;
	uint64_t requested_key;
	void *context;
	size_t auth_key_size;
	uint8_t *auth_key;
	uint32_t iface;
	uint64_t device;
	uint64_t flags;
	/* dma-buf: used instead of iov when use_dmabuf is not 0 */
	int32_t use_dmabuf;
	int32_t dmabuf_fd;
	uint64_t dmabuf_offset;
	size_t dmabuf_len;
	void *dmabuf_base;
};

/* 1 if the headers built against describe dma-buf registration. */
int fcs_headers_have_dmabuf(void);
/* The version of the headers built against, as FI_VERSION makes it. */
uint32_t fcs_headers_version(void);

int fcs_mr_regattr(struct fid_domain *domain, const struct fcs_mr_request *request,
		   struct fid_mr **mr);
int fcs_mr_refresh(struct fid_mr *mr, const struct iovec *iov, size_t count, uint64_t flags);
int fcs_mr_bind(struct fid_mr *mr, struct fid *bound, uint64_t flags);
int fcs_mr_enable(struct fid_mr *mr);
int fcs_mr_raw_attr(struct fid_mr *mr, uint64_t *base, uint8_t *raw_key, size_t *key_size,
		    uint64_t flags);
int fcs_mr_map_raw(struct fid_domain *domain, uint64_t base, uint8_t *raw_key, size_t key_size,
		   uint64_t *key, uint64_t flags);
int fcs_mr_unmap_key(struct fid_domain *domain, uint64_t key);

const char *fcs_cq_strerror(struct fid_cq *cq, int provider_code, const void *data, char *buffer,
			    size_t size);
const char *fcs_eq_strerror(struct fid_eq *eq, int provider_code, const void *data, char *buffer,
			    size_t size);
int fcs_cq_signal(struct fid_cq *cq);
ssize_t fcs_cancel(struct fid *endpoint, void *context);
int fcs_trywait(struct fid_fabric *fabric, struct fid **fids, int count);
int fcs_query_atomic(struct fid_domain *domain, int datatype, int op, uint64_t flags,
		     size_t *count, size_t *size);
int fcs_set_hmem_p2p(struct fid_ep *endpoint, int policy);
/* FI_OPT_INJECT_RMA_SIZE, which headers before 2.0 do not name. */
int fcs_inject_rma_size(struct fid_ep *endpoint, size_t *size);

/* `data_progress`: a plain field up to 1.x, a member of an anonymous union in 2.x. */
int fcs_data_progress(const struct fi_domain_attr *attr);
void fcs_set_data_progress(struct fi_domain_attr *attr, int progress);
int fcs_av_remove(struct fid_av *av, fi_addr_t address);
/* The wait object's file descriptor of a CQ, EQ or counter. */
int fcs_wait_fd(struct fid *fid, int *fd);
/* Is this operation there at all? (Tables of absent operations may be null.) */
int fcs_has_tagged(const struct fid_ep *endpoint);
int fcs_has_msg(const struct fid_ep *endpoint);
int fcs_has_rma(const struct fid_ep *endpoint);
int fcs_has_atomic(const struct fid_ep *endpoint);

/* PCI place of a NIC; 0 if it is not a PCI device. */
int fcs_nic_pci(const struct fid_nic *nic, uint16_t *domain, uint8_t *bus, uint8_t *device,
		uint8_t *function);

#endif
