#include "shim.h"

#include <stddef.h>

/*
 * Values that the Rust side spells out because they are not visible to bindgen
 * in all header versions. They are part of libfabric's ABI; if one ever
 * differed, this file would not compile.
 */
_Static_assert(FI_MR_BASIC == 1, "FI_MR_BASIC");
_Static_assert(FI_MR_SCALABLE == 2, "FI_MR_SCALABLE");
_Static_assert(FI_ADDR_UNSPEC == UINT64_MAX, "FI_ADDR_UNSPEC");
_Static_assert(FI_KEY_NOTAVAIL == UINT64_MAX, "FI_KEY_NOTAVAIL");
#ifdef FI_MR_DMABUF
_Static_assert(FI_MR_DMABUF == (1ULL << 40), "FI_MR_DMABUF");
#endif

/* src/calls.rs repeats it, because the loaded library may know it even if the headers do not. */
#if FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION) >= FI_VERSION(2, 1)
_Static_assert(FI_OPT_INJECT_RMA_SIZE == 18, "FI_OPT_INJECT_RMA_SIZE");
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

int fcs_mr_regattr(int (*call)(struct fid *, const struct fi_mr_attr *, uint64_t, struct fid_mr **),
		   struct fid *domain, const struct fcs_mr_request *request, struct fid_mr **mr)
{
	struct fi_mr_attr attr;
	uint64_t flags = request->flags;

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
	return call(domain, &attr, flags, mr);
}

int fcs_mr_refresh(int (*control)(struct fid *, int, void *), struct fid *mr,
		   const struct iovec *iov, size_t count, uint64_t flags)
{
	struct fi_mr_modify modify;

	memset(&modify, 0, sizeof(modify));
	modify.flags = flags;
	modify.attr.mr_iov = iov;
	modify.attr.iov_count = count;
	return control(mr, FI_REFRESH, &modify);
}

int fcs_data_progress(const struct fi_domain_attr *attr)
{
	return attr->data_progress;
}

void fcs_set_data_progress(struct fi_domain_attr *attr, int progress)
{
	attr->data_progress = (enum fi_progress)progress;
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
