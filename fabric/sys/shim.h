/*
 * The part of libfabric that bindgen cannot translate.
 *
 * Most of libfabric's API is `static inline`; src/calls.rs has the used part.
 * This file has the rest:
 *   - structures that differ between 1.17 and 2.x (anonymous unions, fields
 *     added at the end): they are filled here, in C, from structures of this
 *     library that never change;
 *   - features of newer headers (dma-buf), which return -FI_ENOSYS if the
 *     build's headers lack them.
 * Nothing is called through an operation table: the filled structures are passed
 * to a function argument, which checks that the object has the entry.
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

/* 1 if the headers of this build describe dma-buf registration. */
int fcs_headers_have_dmabuf(void);
/* The version of the headers of this build, as FI_VERSION encodes it. */
uint32_t fcs_headers_version(void);

/* `call` is fi_mr_regattr. */
int fcs_mr_regattr(int (*call)(struct fid *, const struct fi_mr_attr *, uint64_t, struct fid_mr **),
		   struct fid *domain, const struct fcs_mr_request *request, struct fid_mr **mr);
/* `control` is fi_control. */
int fcs_mr_refresh(int (*control)(struct fid *, int, void *), struct fid *mr,
		   const struct iovec *iov, size_t count, uint64_t flags);

/* `data_progress`: a plain field up to 1.x, a member of an anonymous union in 2.x. */
int fcs_data_progress(const struct fi_domain_attr *attr);
void fcs_set_data_progress(struct fi_domain_attr *attr, int progress);

/* PCI address of a NIC; 0 if it is not a PCI device. */
int fcs_nic_pci(const struct fid_nic *nic, uint16_t *domain, uint8_t *bus, uint8_t *device,
		uint8_t *function);

#endif
