#include "shim.h"

#include <stddef.h>

/*
 * Values that the Rust side spells out because they are not visible to bindgen
 * in all header versions. They are part of libfabric's ABI; if one ever
 * differed, this file would not compile.
 */
_Static_assert(FI_MR_BASIC == 1, "FI_MR_BASIC");
_Static_assert(FI_MR_SCALABLE == 2, "FI_MR_SCALABLE");
_Static_assert(FI_ORDER_STRICT == 0x1FF, "FI_ORDER_STRICT");
_Static_assert(FI_ADDR_UNSPEC == UINT64_MAX, "FI_ADDR_UNSPEC");
_Static_assert(FI_KEY_NOTAVAIL == UINT64_MAX, "FI_KEY_NOTAVAIL");
#ifdef FI_MR_DMABUF
_Static_assert(FI_MR_DMABUF == (1ULL << 40), "FI_MR_DMABUF");
#endif

/* Part of the ABI, too: the library that is loaded may know it though the headers do not. */
#define FCS_OPT_INJECT_RMA_SIZE 18
#if FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION) >= FI_VERSION(2, 1)
_Static_assert(FI_OPT_INJECT_RMA_SIZE == FCS_OPT_INJECT_RMA_SIZE, "FI_OPT_INJECT_RMA_SIZE");
#endif

int fcs_headers_have_dmabuf(void)
{
#ifdef FI_MR_DMABUF
	return 1;
#else
	return 0;
#endif
}

uint32_t fcs_headers_version(void)
{
	return FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION);
}

int fcs_mr_regattr(struct fid_domain *domain, const struct fcs_mr_request *request,
		   struct fid_mr **mr)
{
	struct fi_mr_attr attr;
	uint64_t flags = request->flags;

	if (!FI_CHECK_OP(domain->mr, struct fi_ops_mr, regattr))
		return -FI_ENOSYS;

	memset(&attr, 0, sizeof(attr));
	attr.mr_iov = request->iov;
	attr.iov_count = request->iov_count;
	attr.access = request->access;
	attr.offset = request->offset;
	attr.requested_key = request->requested_key;
	attr.context = request->context;
	attr.auth_key_size = request->auth_key_size;
	attr.auth_key = request->auth_key;
	attr.iface = (enum fi_hmem_iface)request->iface;
	attr.device.reserved = request->device;

#ifdef FI_MR_DMABUF
	struct fi_mr_dmabuf dmabuf;
	if (request->use_dmabuf) {
		memset(&dmabuf, 0, sizeof(dmabuf));
		dmabuf.fd = request->dmabuf_fd;
		dmabuf.offset = request->dmabuf_offset;
		dmabuf.len = request->dmabuf_len;
		dmabuf.base_addr = request->dmabuf_base;
		attr.dmabuf = &dmabuf;
		attr.iov_count = 1;
		flags |= FI_MR_DMABUF;
	}
#else
	if (request->use_dmabuf)
		return -FI_ENOSYS;
#endif
	return fi_mr_regattr(domain, &attr, flags, mr);
}

/* Does this object have a working `control` entry? */
static int has_control(const struct fid *fid)
{
	return FI_CHECK_OP(fid->ops, struct fi_ops, control);
}

int fcs_mr_refresh(struct fid_mr *mr, const struct iovec *iov, size_t count, uint64_t flags)
{
	return has_control(&mr->fid) ? fi_mr_refresh(mr, iov, count, flags) : -FI_ENOSYS;
}

int fcs_mr_enable(struct fid_mr *mr)
{
	return has_control(&mr->fid) ? fi_mr_enable(mr) : -FI_ENOSYS;
}

int fcs_mr_bind(struct fid_mr *mr, struct fid *bound, uint64_t flags)
{
	return FI_CHECK_OP(mr->fid.ops, struct fi_ops, bind) ? fi_mr_bind(mr, bound, flags)
							     : -FI_ENOSYS;
}

int fcs_mr_raw_attr(struct fid_mr *mr, uint64_t *base, uint8_t *raw_key, size_t *key_size,
		    uint64_t flags)
{
	return has_control(&mr->fid) ? fi_mr_raw_attr(mr, base, raw_key, key_size, flags)
				     : -FI_ENOSYS;
}

int fcs_mr_map_raw(struct fid_domain *domain, uint64_t base, uint8_t *raw_key, size_t key_size,
		   uint64_t *key, uint64_t flags)
{
	return has_control(&domain->fid)
		       ? fi_mr_map_raw(domain, base, raw_key, key_size, key, flags)
		       : -FI_ENOSYS;
}

int fcs_mr_unmap_key(struct fid_domain *domain, uint64_t key)
{
	return has_control(&domain->fid) ? fi_mr_unmap_key(domain, key) : -FI_ENOSYS;
}

const char *fcs_cq_strerror(struct fid_cq *cq, int provider_code, const void *data, char *buffer,
			    size_t size)
{
	if (!FI_CHECK_OP(cq->ops, struct fi_ops_cq, strerror))
		return NULL;
	return fi_cq_strerror(cq, provider_code, data, buffer, size);
}

const char *fcs_eq_strerror(struct fid_eq *eq, int provider_code, const void *data, char *buffer,
			    size_t size)
{
	if (!FI_CHECK_OP(eq->ops, struct fi_ops_eq, strerror))
		return NULL;
	return fi_eq_strerror(eq, provider_code, data, buffer, size);
}

int fcs_cq_signal(struct fid_cq *cq)
{
	return FI_CHECK_OP(cq->ops, struct fi_ops_cq, signal) ? fi_cq_signal(cq) : -FI_ENOSYS;
}

ssize_t fcs_cancel(struct fid *endpoint, void *context)
{
	struct fid_ep *ep = (struct fid_ep *)endpoint;

	return FI_CHECK_OP(ep->ops, struct fi_ops_ep, cancel) ? fi_cancel(endpoint, context)
							      : -FI_ENOSYS;
}

int fcs_trywait(struct fid_fabric *fabric, struct fid **fids, int count)
{
	return FI_CHECK_OP(fabric->ops, struct fi_ops_fabric, trywait)
		       ? fi_trywait(fabric, fids, count)
		       : -FI_ENOSYS;
}

int fcs_query_atomic(struct fid_domain *domain, int datatype, int op, uint64_t flags,
		     size_t *count, size_t *size)
{
	struct fi_atomic_attr attr;
	int result;

	if (!FI_CHECK_OP(domain->ops, struct fi_ops_domain, query_atomic))
		return -FI_ENOSYS;
	memset(&attr, 0, sizeof(attr));
	result = fi_query_atomic(domain, (enum fi_datatype)datatype, (enum fi_op)op, &attr, flags);
	*count = attr.count;
	*size = attr.size;
	return result;
}

int fcs_set_hmem_p2p(struct fid_ep *endpoint, int policy)
{
	return fi_setopt(&endpoint->fid, FI_OPT_ENDPOINT, FI_OPT_FI_HMEM_P2P, &policy,
			 sizeof(policy));
}

int fcs_inject_rma_size(struct fid_ep *endpoint, size_t *size)
{
	size_t length = sizeof(*size);

	if (!FI_CHECK_OP(endpoint->ops, struct fi_ops_ep, getopt))
		return -FI_ENOSYS;
	return fi_getopt(&endpoint->fid, FI_OPT_ENDPOINT, FCS_OPT_INJECT_RMA_SIZE, size, &length);
}

int fcs_data_progress(const struct fi_domain_attr *attr)
{
	return attr->data_progress;
}

void fcs_set_data_progress(struct fi_domain_attr *attr, int progress)
{
	attr->data_progress = (enum fi_progress)progress;
}

int fcs_av_remove(struct fid_av *av, fi_addr_t address)
{
	return FI_CHECK_OP(av->ops, struct fi_ops_av, remove) ? fi_av_remove(av, &address, 1, 0)
							      : -FI_ENOSYS;
}

int fcs_wait_fd(struct fid *fid, int *fd)
{
	return has_control(fid) ? fi_control(fid, FI_GETWAIT, fd) : -FI_ENOSYS;
}

int fcs_has_tagged(const struct fid_ep *endpoint)
{
	return endpoint->tagged != NULL;
}

int fcs_has_msg(const struct fid_ep *endpoint)
{
	return endpoint->msg != NULL;
}

int fcs_has_rma(const struct fid_ep *endpoint)
{
	return endpoint->rma != NULL;
}

int fcs_has_atomic(const struct fid_ep *endpoint)
{
	return endpoint->atomic != NULL;
}

int fcs_nic_pci(const struct fid_nic *nic, uint16_t *domain, uint8_t *bus, uint8_t *device,
		uint8_t *function)
{
	if (!nic || !nic->bus_attr || nic->bus_attr->bus_type != FI_BUS_PCI)
		return 0;
	*domain = nic->bus_attr->attr.pci.domain_id;
	*bus = nic->bus_attr->attr.pci.bus_id;
	*device = nic->bus_attr->attr.pci.device_id;
	*function = nic->bus_attr->attr.pci.function_id;
	return 1;
}
