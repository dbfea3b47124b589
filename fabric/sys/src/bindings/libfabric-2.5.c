#include "shim.h"

// Static wrappers

int fi_close__extern(struct fid *fid) { return fi_close(fid); }
int fi_eq_open__extern(struct fid_fabric *fabric, struct fi_eq_attr *attr, struct fid_eq **eq, void *context) { return fi_eq_open(fabric, attr, eq, context); }
ssize_t fi_eq_read__extern(struct fid_eq *eq, uint32_t *event, void *buf, size_t len, uint64_t flags) { return fi_eq_read(eq, event, buf, len, flags); }
ssize_t fi_eq_readerr__extern(struct fid_eq *eq, struct fi_eq_err_entry *buf, uint64_t flags) { return fi_eq_readerr(eq, buf, flags); }
ssize_t fi_cq_readfrom__extern(struct fid_cq *cq, void *buf, size_t count, fi_addr_t *src_addr) { return fi_cq_readfrom(cq, buf, count, src_addr); }
ssize_t fi_cq_readerr__extern(struct fid_cq *cq, struct fi_cq_err_entry *buf, uint64_t flags) { return fi_cq_readerr(cq, buf, flags); }
ssize_t fi_cq_sread__extern(struct fid_cq *cq, void *buf, size_t count, const void *cond, int timeout) { return fi_cq_sread(cq, buf, count, cond, timeout); }
ssize_t fi_cq_sreadfrom__extern(struct fid_cq *cq, void *buf, size_t count, fi_addr_t *src_addr, const void *cond, int timeout) { return fi_cq_sreadfrom(cq, buf, count, src_addr, cond, timeout); }
uint64_t fi_cntr_read__extern(struct fid_cntr *cntr) { return fi_cntr_read(cntr); }
uint64_t fi_cntr_readerr__extern(struct fid_cntr *cntr) { return fi_cntr_readerr(cntr); }
int fi_domain__extern(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **domain, void *context) { return fi_domain(fabric, info, domain, context); }
int fi_domain_bind__extern(struct fid_domain *domain, struct fid *fid, uint64_t flags) { return fi_domain_bind(domain, fid, flags); }
int fi_cq_open__extern(struct fid_domain *domain, struct fi_cq_attr *attr, struct fid_cq **cq, void *context) { return fi_cq_open(domain, attr, cq, context); }
int fi_cntr_open__extern(struct fid_domain *domain, struct fi_cntr_attr *attr, struct fid_cntr **cntr, void *context) { return fi_cntr_open(domain, attr, cntr, context); }
void * fi_mr_desc__extern(struct fid_mr *mr) { return fi_mr_desc(mr); }
uint64_t fi_mr_key__extern(struct fid_mr *mr) { return fi_mr_key(mr); }
int fi_av_open__extern(struct fid_domain *domain, struct fi_av_attr *attr, struct fid_av **av, void *context) { return fi_av_open(domain, attr, av, context); }
int fi_av_insert__extern(struct fid_av *av, const void *addr, size_t count, fi_addr_t *fi_addr, uint64_t flags, void *context) { return fi_av_insert(av, addr, count, fi_addr, flags, context); }
int fi_av_lookup__extern(struct fid_av *av, fi_addr_t fi_addr, void *addr, size_t *addrlen) { return fi_av_lookup(av, fi_addr, addr, addrlen); }
int fi_passive_ep__extern(struct fid_fabric *fabric, struct fi_info *info, struct fid_pep **pep, void *context) { return fi_passive_ep(fabric, info, pep, context); }
int fi_endpoint__extern(struct fid_domain *domain, struct fi_info *info, struct fid_ep **ep, void *context) { return fi_endpoint(domain, info, ep, context); }
int fi_ep_bind__extern(struct fid_ep *ep, struct fid *bfid, uint64_t flags) { return fi_ep_bind(ep, bfid, flags); }
int fi_pep_bind__extern(struct fid_pep *pep, struct fid *bfid, uint64_t flags) { return fi_pep_bind(pep, bfid, flags); }
int fi_enable__extern(struct fid_ep *ep) { return fi_enable(ep); }
ssize_t fi_sendmsg__extern(struct fid_ep *ep, const struct fi_msg *msg, uint64_t flags) { return fi_sendmsg(ep, msg, flags); }
ssize_t fi_inject__extern(struct fid_ep *ep, const void *buf, size_t len, fi_addr_t dest_addr) { return fi_inject(ep, buf, len, dest_addr); }
ssize_t fi_readmsg__extern(struct fid_ep *ep, const struct fi_msg_rma *msg, uint64_t flags) { return fi_readmsg(ep, msg, flags); }
ssize_t fi_writemsg__extern(struct fid_ep *ep, const struct fi_msg_rma *msg, uint64_t flags) { return fi_writemsg(ep, msg, flags); }
ssize_t fi_inject_write__extern(struct fid_ep *ep, const void *buf, size_t len, fi_addr_t dest_addr, uint64_t addr, uint64_t key) { return fi_inject_write(ep, buf, len, dest_addr, addr, key); }
ssize_t fi_inject_writedata__extern(struct fid_ep *ep, const void *buf, size_t len, uint64_t data, fi_addr_t dest_addr, uint64_t addr, uint64_t key) { return fi_inject_writedata(ep, buf, len, data, dest_addr, addr, key); }
ssize_t fi_atomic__extern(struct fid_ep *ep, const void *buf, size_t count, void *desc, fi_addr_t dest_addr, uint64_t addr, uint64_t key, enum fi_datatype datatype, enum fi_op op, void *context) { return fi_atomic(ep, buf, count, desc, dest_addr, addr, key, datatype, op, context); }
ssize_t fi_fetch_atomic__extern(struct fid_ep *ep, const void *buf, size_t count, void *desc, void *result, void *result_desc, fi_addr_t dest_addr, uint64_t addr, uint64_t key, enum fi_datatype datatype, enum fi_op op, void *context) { return fi_fetch_atomic(ep, buf, count, desc, result, result_desc, dest_addr, addr, key, datatype, op, context); }
ssize_t fi_compare_atomic__extern(struct fid_ep *ep, const void *buf, size_t count, void *desc, const void *compare, void *compare_desc, void *result, void *result_desc, fi_addr_t dest_addr, uint64_t addr, uint64_t key, enum fi_datatype datatype, enum fi_op op, void *context) { return fi_compare_atomic(ep, buf, count, desc, compare, compare_desc, result, result_desc, dest_addr, addr, key, datatype, op, context); }
int fi_getname__extern(fid_t fid, void *addr, size_t *addrlen) { return fi_getname(fid, addr, addrlen); }
int fi_listen__extern(struct fid_pep *pep) { return fi_listen(pep); }
int fi_connect__extern(struct fid_ep *ep, const void *addr, const void *param, size_t paramlen) { return fi_connect(ep, addr, param, paramlen); }
int fi_accept__extern(struct fid_ep *ep, const void *param, size_t paramlen) { return fi_accept(ep, param, paramlen); }
int fi_reject__extern(struct fid_pep *pep, fid_t handle, const void *param, size_t paramlen) { return fi_reject(pep, handle, param, paramlen); }
int fi_shutdown__extern(struct fid_ep *ep, uint64_t flags) { return fi_shutdown(ep, flags); }
ssize_t fi_trecv__extern(struct fid_ep *ep, void *buf, size_t len, void *desc, fi_addr_t src_addr, uint64_t tag, uint64_t ignore, void *context) { return fi_trecv(ep, buf, len, desc, src_addr, tag, ignore, context); }
ssize_t fi_tsendmsg__extern(struct fid_ep *ep, const struct fi_msg_tagged *msg, uint64_t flags) { return fi_tsendmsg(ep, msg, flags); }
ssize_t fi_tinject__extern(struct fid_ep *ep, const void *buf, size_t len, fi_addr_t dest_addr, uint64_t tag) { return fi_tinject(ep, buf, len, dest_addr, tag); }

#include <stddef.h>

// Layout

_Static_assert(sizeof(struct fi_tx_attr) == 80, "sizeof(struct fi_tx_attr)");
_Static_assert(offsetof(struct fi_tx_attr, caps) == 0, "offsetof(struct fi_tx_attr, caps)");
_Static_assert(offsetof(struct fi_tx_attr, mode) == 8, "offsetof(struct fi_tx_attr, mode)");
_Static_assert(offsetof(struct fi_tx_attr, op_flags) == 16, "offsetof(struct fi_tx_attr, op_flags)");
_Static_assert(offsetof(struct fi_tx_attr, msg_order) == 24, "offsetof(struct fi_tx_attr, msg_order)");
_Static_assert(offsetof(struct fi_tx_attr, comp_order) == 32, "offsetof(struct fi_tx_attr, comp_order)");
_Static_assert(offsetof(struct fi_tx_attr, inject_size) == 40, "offsetof(struct fi_tx_attr, inject_size)");
_Static_assert(offsetof(struct fi_tx_attr, size) == 48, "offsetof(struct fi_tx_attr, size)");
_Static_assert(offsetof(struct fi_tx_attr, iov_limit) == 56, "offsetof(struct fi_tx_attr, iov_limit)");
_Static_assert(offsetof(struct fi_tx_attr, rma_iov_limit) == 64, "offsetof(struct fi_tx_attr, rma_iov_limit)");
_Static_assert(offsetof(struct fi_tx_attr, tclass) == 72, "offsetof(struct fi_tx_attr, tclass)");
_Static_assert(sizeof(struct fi_rx_attr) == 64, "sizeof(struct fi_rx_attr)");
_Static_assert(offsetof(struct fi_rx_attr, caps) == 0, "offsetof(struct fi_rx_attr, caps)");
_Static_assert(offsetof(struct fi_rx_attr, mode) == 8, "offsetof(struct fi_rx_attr, mode)");
_Static_assert(offsetof(struct fi_rx_attr, op_flags) == 16, "offsetof(struct fi_rx_attr, op_flags)");
_Static_assert(offsetof(struct fi_rx_attr, msg_order) == 24, "offsetof(struct fi_rx_attr, msg_order)");
_Static_assert(offsetof(struct fi_rx_attr, comp_order) == 32, "offsetof(struct fi_rx_attr, comp_order)");
_Static_assert(offsetof(struct fi_rx_attr, total_buffered_recv) == 40, "offsetof(struct fi_rx_attr, total_buffered_recv)");
_Static_assert(offsetof(struct fi_rx_attr, size) == 48, "offsetof(struct fi_rx_attr, size)");
_Static_assert(offsetof(struct fi_rx_attr, iov_limit) == 56, "offsetof(struct fi_rx_attr, iov_limit)");
_Static_assert(sizeof(struct fi_ep_attr) == 96, "sizeof(struct fi_ep_attr)");
_Static_assert(offsetof(struct fi_ep_attr, type) == 0, "offsetof(struct fi_ep_attr, type)");
_Static_assert(offsetof(struct fi_ep_attr, protocol) == 4, "offsetof(struct fi_ep_attr, protocol)");
_Static_assert(offsetof(struct fi_ep_attr, protocol_version) == 8, "offsetof(struct fi_ep_attr, protocol_version)");
_Static_assert(offsetof(struct fi_ep_attr, max_msg_size) == 16, "offsetof(struct fi_ep_attr, max_msg_size)");
_Static_assert(offsetof(struct fi_ep_attr, msg_prefix_size) == 24, "offsetof(struct fi_ep_attr, msg_prefix_size)");
_Static_assert(offsetof(struct fi_ep_attr, max_order_raw_size) == 32, "offsetof(struct fi_ep_attr, max_order_raw_size)");
_Static_assert(offsetof(struct fi_ep_attr, max_order_war_size) == 40, "offsetof(struct fi_ep_attr, max_order_war_size)");
_Static_assert(offsetof(struct fi_ep_attr, max_order_waw_size) == 48, "offsetof(struct fi_ep_attr, max_order_waw_size)");
_Static_assert(offsetof(struct fi_ep_attr, mem_tag_format) == 56, "offsetof(struct fi_ep_attr, mem_tag_format)");
_Static_assert(offsetof(struct fi_ep_attr, tx_ctx_cnt) == 64, "offsetof(struct fi_ep_attr, tx_ctx_cnt)");
_Static_assert(offsetof(struct fi_ep_attr, rx_ctx_cnt) == 72, "offsetof(struct fi_ep_attr, rx_ctx_cnt)");
_Static_assert(offsetof(struct fi_ep_attr, auth_key_size) == 80, "offsetof(struct fi_ep_attr, auth_key_size)");
_Static_assert(offsetof(struct fi_ep_attr, auth_key) == 88, "offsetof(struct fi_ep_attr, auth_key)");
_Static_assert(sizeof(struct fi_domain_attr) == 224, "sizeof(struct fi_domain_attr)");
_Static_assert(offsetof(struct fi_domain_attr, domain) == 0, "offsetof(struct fi_domain_attr, domain)");
_Static_assert(offsetof(struct fi_domain_attr, name) == 8, "offsetof(struct fi_domain_attr, name)");
_Static_assert(offsetof(struct fi_domain_attr, threading) == 16, "offsetof(struct fi_domain_attr, threading)");
_Static_assert(offsetof(struct fi_domain_attr, control_progress) == 20, "offsetof(struct fi_domain_attr, control_progress)");
_Static_assert(offsetof(struct fi_domain_attr, resource_mgmt) == 28, "offsetof(struct fi_domain_attr, resource_mgmt)");
_Static_assert(offsetof(struct fi_domain_attr, av_type) == 32, "offsetof(struct fi_domain_attr, av_type)");
_Static_assert(offsetof(struct fi_domain_attr, mr_mode) == 36, "offsetof(struct fi_domain_attr, mr_mode)");
_Static_assert(offsetof(struct fi_domain_attr, mr_key_size) == 40, "offsetof(struct fi_domain_attr, mr_key_size)");
_Static_assert(offsetof(struct fi_domain_attr, cq_data_size) == 48, "offsetof(struct fi_domain_attr, cq_data_size)");
_Static_assert(offsetof(struct fi_domain_attr, cq_cnt) == 56, "offsetof(struct fi_domain_attr, cq_cnt)");
_Static_assert(offsetof(struct fi_domain_attr, ep_cnt) == 64, "offsetof(struct fi_domain_attr, ep_cnt)");
_Static_assert(offsetof(struct fi_domain_attr, tx_ctx_cnt) == 72, "offsetof(struct fi_domain_attr, tx_ctx_cnt)");
_Static_assert(offsetof(struct fi_domain_attr, rx_ctx_cnt) == 80, "offsetof(struct fi_domain_attr, rx_ctx_cnt)");
_Static_assert(offsetof(struct fi_domain_attr, max_ep_tx_ctx) == 88, "offsetof(struct fi_domain_attr, max_ep_tx_ctx)");
_Static_assert(offsetof(struct fi_domain_attr, max_ep_rx_ctx) == 96, "offsetof(struct fi_domain_attr, max_ep_rx_ctx)");
_Static_assert(offsetof(struct fi_domain_attr, max_ep_stx_ctx) == 104, "offsetof(struct fi_domain_attr, max_ep_stx_ctx)");
_Static_assert(offsetof(struct fi_domain_attr, max_ep_srx_ctx) == 112, "offsetof(struct fi_domain_attr, max_ep_srx_ctx)");
_Static_assert(offsetof(struct fi_domain_attr, cntr_cnt) == 120, "offsetof(struct fi_domain_attr, cntr_cnt)");
_Static_assert(offsetof(struct fi_domain_attr, mr_iov_limit) == 128, "offsetof(struct fi_domain_attr, mr_iov_limit)");
_Static_assert(offsetof(struct fi_domain_attr, caps) == 136, "offsetof(struct fi_domain_attr, caps)");
_Static_assert(offsetof(struct fi_domain_attr, mode) == 144, "offsetof(struct fi_domain_attr, mode)");
_Static_assert(offsetof(struct fi_domain_attr, auth_key) == 152, "offsetof(struct fi_domain_attr, auth_key)");
_Static_assert(offsetof(struct fi_domain_attr, auth_key_size) == 160, "offsetof(struct fi_domain_attr, auth_key_size)");
_Static_assert(offsetof(struct fi_domain_attr, max_err_data) == 168, "offsetof(struct fi_domain_attr, max_err_data)");
_Static_assert(offsetof(struct fi_domain_attr, mr_cnt) == 176, "offsetof(struct fi_domain_attr, mr_cnt)");
_Static_assert(offsetof(struct fi_domain_attr, tclass) == 184, "offsetof(struct fi_domain_attr, tclass)");
_Static_assert(offsetof(struct fi_domain_attr, max_ep_auth_key) == 192, "offsetof(struct fi_domain_attr, max_ep_auth_key)");
_Static_assert(offsetof(struct fi_domain_attr, max_group_id) == 200, "offsetof(struct fi_domain_attr, max_group_id)");
_Static_assert(offsetof(struct fi_domain_attr, max_cntr_value) == 208, "offsetof(struct fi_domain_attr, max_cntr_value)");
_Static_assert(offsetof(struct fi_domain_attr, max_err_cntr_value) == 216, "offsetof(struct fi_domain_attr, max_err_cntr_value)");
_Static_assert(sizeof(struct fi_fabric_attr) == 32, "sizeof(struct fi_fabric_attr)");
_Static_assert(offsetof(struct fi_fabric_attr, fabric) == 0, "offsetof(struct fi_fabric_attr, fabric)");
_Static_assert(offsetof(struct fi_fabric_attr, name) == 8, "offsetof(struct fi_fabric_attr, name)");
_Static_assert(offsetof(struct fi_fabric_attr, prov_name) == 16, "offsetof(struct fi_fabric_attr, prov_name)");
_Static_assert(offsetof(struct fi_fabric_attr, prov_version) == 24, "offsetof(struct fi_fabric_attr, prov_version)");
_Static_assert(offsetof(struct fi_fabric_attr, api_version) == 28, "offsetof(struct fi_fabric_attr, api_version)");
_Static_assert(sizeof(struct fi_info) == 120, "sizeof(struct fi_info)");
_Static_assert(offsetof(struct fi_info, next) == 0, "offsetof(struct fi_info, next)");
_Static_assert(offsetof(struct fi_info, caps) == 8, "offsetof(struct fi_info, caps)");
_Static_assert(offsetof(struct fi_info, mode) == 16, "offsetof(struct fi_info, mode)");
_Static_assert(offsetof(struct fi_info, addr_format) == 24, "offsetof(struct fi_info, addr_format)");
_Static_assert(offsetof(struct fi_info, src_addrlen) == 32, "offsetof(struct fi_info, src_addrlen)");
_Static_assert(offsetof(struct fi_info, dest_addrlen) == 40, "offsetof(struct fi_info, dest_addrlen)");
_Static_assert(offsetof(struct fi_info, src_addr) == 48, "offsetof(struct fi_info, src_addr)");
_Static_assert(offsetof(struct fi_info, dest_addr) == 56, "offsetof(struct fi_info, dest_addr)");
_Static_assert(offsetof(struct fi_info, handle) == 64, "offsetof(struct fi_info, handle)");
_Static_assert(offsetof(struct fi_info, tx_attr) == 72, "offsetof(struct fi_info, tx_attr)");
_Static_assert(offsetof(struct fi_info, rx_attr) == 80, "offsetof(struct fi_info, rx_attr)");
_Static_assert(offsetof(struct fi_info, ep_attr) == 88, "offsetof(struct fi_info, ep_attr)");
_Static_assert(offsetof(struct fi_info, domain_attr) == 96, "offsetof(struct fi_info, domain_attr)");
_Static_assert(offsetof(struct fi_info, fabric_attr) == 104, "offsetof(struct fi_info, fabric_attr)");
_Static_assert(offsetof(struct fi_info, nic) == 112, "offsetof(struct fi_info, nic)");
_Static_assert(sizeof(struct fi_device_attr) == 48, "sizeof(struct fi_device_attr)");
_Static_assert(offsetof(struct fi_device_attr, name) == 0, "offsetof(struct fi_device_attr, name)");
_Static_assert(offsetof(struct fi_device_attr, device_id) == 8, "offsetof(struct fi_device_attr, device_id)");
_Static_assert(offsetof(struct fi_device_attr, device_version) == 16, "offsetof(struct fi_device_attr, device_version)");
_Static_assert(offsetof(struct fi_device_attr, vendor_id) == 24, "offsetof(struct fi_device_attr, vendor_id)");
_Static_assert(offsetof(struct fi_device_attr, driver) == 32, "offsetof(struct fi_device_attr, driver)");
_Static_assert(offsetof(struct fi_device_attr, firmware) == 40, "offsetof(struct fi_device_attr, firmware)");
_Static_assert(sizeof(struct fi_pci_attr) == 6, "sizeof(struct fi_pci_attr)");
_Static_assert(offsetof(struct fi_pci_attr, domain_id) == 0, "offsetof(struct fi_pci_attr, domain_id)");
_Static_assert(offsetof(struct fi_pci_attr, bus_id) == 2, "offsetof(struct fi_pci_attr, bus_id)");
_Static_assert(offsetof(struct fi_pci_attr, device_id) == 3, "offsetof(struct fi_pci_attr, device_id)");
_Static_assert(offsetof(struct fi_pci_attr, function_id) == 4, "offsetof(struct fi_pci_attr, function_id)");
_Static_assert(sizeof(struct fi_bus_attr) == 12, "sizeof(struct fi_bus_attr)");
_Static_assert(sizeof(struct fi_link_attr) == 40, "sizeof(struct fi_link_attr)");
_Static_assert(offsetof(struct fi_link_attr, address) == 0, "offsetof(struct fi_link_attr, address)");
_Static_assert(offsetof(struct fi_link_attr, mtu) == 8, "offsetof(struct fi_link_attr, mtu)");
_Static_assert(offsetof(struct fi_link_attr, speed) == 16, "offsetof(struct fi_link_attr, speed)");
_Static_assert(offsetof(struct fi_link_attr, state) == 24, "offsetof(struct fi_link_attr, state)");
_Static_assert(offsetof(struct fi_link_attr, network_type) == 32, "offsetof(struct fi_link_attr, network_type)");
_Static_assert(sizeof(struct fid) == 24, "sizeof(struct fid)");
_Static_assert(offsetof(struct fid, fclass) == 0, "offsetof(struct fid, fclass)");
_Static_assert(offsetof(struct fid, context) == 8, "offsetof(struct fid, context)");
_Static_assert(offsetof(struct fid, ops) == 16, "offsetof(struct fid, ops)");
_Static_assert(sizeof(struct fid_fabric) == 40, "sizeof(struct fid_fabric)");
_Static_assert(offsetof(struct fid_fabric, fid) == 0, "offsetof(struct fid_fabric, fid)");
_Static_assert(offsetof(struct fid_fabric, ops) == 24, "offsetof(struct fid_fabric, ops)");
_Static_assert(offsetof(struct fid_fabric, api_version) == 32, "offsetof(struct fid_fabric, api_version)");
_Static_assert(sizeof(struct fid_nic) == 56, "sizeof(struct fid_nic)");
_Static_assert(offsetof(struct fid_nic, fid) == 0, "offsetof(struct fid_nic, fid)");
_Static_assert(offsetof(struct fid_nic, device_attr) == 24, "offsetof(struct fid_nic, device_attr)");
_Static_assert(offsetof(struct fid_nic, bus_attr) == 32, "offsetof(struct fid_nic, bus_attr)");
_Static_assert(offsetof(struct fid_nic, link_attr) == 40, "offsetof(struct fid_nic, link_attr)");
_Static_assert(offsetof(struct fid_nic, prov_attr) == 48, "offsetof(struct fid_nic, prov_attr)");
_Static_assert(sizeof(struct fi_context2) == 64, "sizeof(struct fi_context2)");
_Static_assert(offsetof(struct fi_context2, internal) == 0, "offsetof(struct fi_context2, internal)");
_Static_assert(sizeof(struct fid_wait) == 32, "sizeof(struct fid_wait)");
_Static_assert(sizeof(struct fi_eq_attr) == 32, "sizeof(struct fi_eq_attr)");
_Static_assert(offsetof(struct fi_eq_attr, size) == 0, "offsetof(struct fi_eq_attr, size)");
_Static_assert(offsetof(struct fi_eq_attr, flags) == 8, "offsetof(struct fi_eq_attr, flags)");
_Static_assert(offsetof(struct fi_eq_attr, wait_obj) == 16, "offsetof(struct fi_eq_attr, wait_obj)");
_Static_assert(offsetof(struct fi_eq_attr, signaling_vector) == 20, "offsetof(struct fi_eq_attr, signaling_vector)");
_Static_assert(offsetof(struct fi_eq_attr, wait_set) == 24, "offsetof(struct fi_eq_attr, wait_set)");
_Static_assert(sizeof(struct fi_eq_err_entry) == 48, "sizeof(struct fi_eq_err_entry)");
_Static_assert(offsetof(struct fi_eq_err_entry, fid) == 0, "offsetof(struct fi_eq_err_entry, fid)");
_Static_assert(offsetof(struct fi_eq_err_entry, context) == 8, "offsetof(struct fi_eq_err_entry, context)");
_Static_assert(offsetof(struct fi_eq_err_entry, data) == 16, "offsetof(struct fi_eq_err_entry, data)");
_Static_assert(offsetof(struct fi_eq_err_entry, err) == 24, "offsetof(struct fi_eq_err_entry, err)");
_Static_assert(offsetof(struct fi_eq_err_entry, prov_errno) == 28, "offsetof(struct fi_eq_err_entry, prov_errno)");
_Static_assert(offsetof(struct fi_eq_err_entry, err_data) == 32, "offsetof(struct fi_eq_err_entry, err_data)");
_Static_assert(offsetof(struct fi_eq_err_entry, err_data_size) == 40, "offsetof(struct fi_eq_err_entry, err_data_size)");
_Static_assert(sizeof(struct fi_eq_cm_entry) == 16, "sizeof(struct fi_eq_cm_entry)");
_Static_assert(offsetof(struct fi_eq_cm_entry, fid) == 0, "offsetof(struct fi_eq_cm_entry, fid)");
_Static_assert(offsetof(struct fi_eq_cm_entry, info) == 8, "offsetof(struct fi_eq_cm_entry, info)");
_Static_assert(offsetof(struct fi_eq_cm_entry, data) == 16, "offsetof(struct fi_eq_cm_entry, data)");
_Static_assert(sizeof(struct fid_eq) == 32, "sizeof(struct fid_eq)");
_Static_assert(offsetof(struct fid_eq, fid) == 0, "offsetof(struct fid_eq, fid)");
_Static_assert(offsetof(struct fid_eq, ops) == 24, "offsetof(struct fid_eq, ops)");
_Static_assert(sizeof(struct fi_cq_data_entry) == 40, "sizeof(struct fi_cq_data_entry)");
_Static_assert(offsetof(struct fi_cq_data_entry, op_context) == 0, "offsetof(struct fi_cq_data_entry, op_context)");
_Static_assert(offsetof(struct fi_cq_data_entry, flags) == 8, "offsetof(struct fi_cq_data_entry, flags)");
_Static_assert(offsetof(struct fi_cq_data_entry, len) == 16, "offsetof(struct fi_cq_data_entry, len)");
_Static_assert(offsetof(struct fi_cq_data_entry, buf) == 24, "offsetof(struct fi_cq_data_entry, buf)");
_Static_assert(offsetof(struct fi_cq_data_entry, data) == 32, "offsetof(struct fi_cq_data_entry, data)");
_Static_assert(sizeof(struct fi_cq_tagged_entry) == 48, "sizeof(struct fi_cq_tagged_entry)");
_Static_assert(offsetof(struct fi_cq_tagged_entry, op_context) == 0, "offsetof(struct fi_cq_tagged_entry, op_context)");
_Static_assert(offsetof(struct fi_cq_tagged_entry, flags) == 8, "offsetof(struct fi_cq_tagged_entry, flags)");
_Static_assert(offsetof(struct fi_cq_tagged_entry, len) == 16, "offsetof(struct fi_cq_tagged_entry, len)");
_Static_assert(offsetof(struct fi_cq_tagged_entry, buf) == 24, "offsetof(struct fi_cq_tagged_entry, buf)");
_Static_assert(offsetof(struct fi_cq_tagged_entry, data) == 32, "offsetof(struct fi_cq_tagged_entry, data)");
_Static_assert(offsetof(struct fi_cq_tagged_entry, tag) == 40, "offsetof(struct fi_cq_tagged_entry, tag)");
_Static_assert(sizeof(struct fi_cq_err_entry) == 88, "sizeof(struct fi_cq_err_entry)");
_Static_assert(offsetof(struct fi_cq_err_entry, op_context) == 0, "offsetof(struct fi_cq_err_entry, op_context)");
_Static_assert(offsetof(struct fi_cq_err_entry, flags) == 8, "offsetof(struct fi_cq_err_entry, flags)");
_Static_assert(offsetof(struct fi_cq_err_entry, len) == 16, "offsetof(struct fi_cq_err_entry, len)");
_Static_assert(offsetof(struct fi_cq_err_entry, buf) == 24, "offsetof(struct fi_cq_err_entry, buf)");
_Static_assert(offsetof(struct fi_cq_err_entry, data) == 32, "offsetof(struct fi_cq_err_entry, data)");
_Static_assert(offsetof(struct fi_cq_err_entry, tag) == 40, "offsetof(struct fi_cq_err_entry, tag)");
_Static_assert(offsetof(struct fi_cq_err_entry, olen) == 48, "offsetof(struct fi_cq_err_entry, olen)");
_Static_assert(offsetof(struct fi_cq_err_entry, err) == 56, "offsetof(struct fi_cq_err_entry, err)");
_Static_assert(offsetof(struct fi_cq_err_entry, prov_errno) == 60, "offsetof(struct fi_cq_err_entry, prov_errno)");
_Static_assert(offsetof(struct fi_cq_err_entry, err_data) == 64, "offsetof(struct fi_cq_err_entry, err_data)");
_Static_assert(offsetof(struct fi_cq_err_entry, err_data_size) == 72, "offsetof(struct fi_cq_err_entry, err_data_size)");
_Static_assert(offsetof(struct fi_cq_err_entry, src_addr) == 80, "offsetof(struct fi_cq_err_entry, src_addr)");
_Static_assert(sizeof(struct fi_cq_attr) == 40, "sizeof(struct fi_cq_attr)");
_Static_assert(offsetof(struct fi_cq_attr, size) == 0, "offsetof(struct fi_cq_attr, size)");
_Static_assert(offsetof(struct fi_cq_attr, flags) == 8, "offsetof(struct fi_cq_attr, flags)");
_Static_assert(offsetof(struct fi_cq_attr, format) == 16, "offsetof(struct fi_cq_attr, format)");
_Static_assert(offsetof(struct fi_cq_attr, wait_obj) == 20, "offsetof(struct fi_cq_attr, wait_obj)");
_Static_assert(offsetof(struct fi_cq_attr, signaling_vector) == 24, "offsetof(struct fi_cq_attr, signaling_vector)");
_Static_assert(offsetof(struct fi_cq_attr, wait_cond) == 28, "offsetof(struct fi_cq_attr, wait_cond)");
_Static_assert(offsetof(struct fi_cq_attr, wait_set) == 32, "offsetof(struct fi_cq_attr, wait_set)");
_Static_assert(offsetof(struct fi_ops_cq, size) == 0, "offsetof(struct fi_ops_cq, size)");
_Static_assert(offsetof(struct fi_ops_cq, read) == 8, "offsetof(struct fi_ops_cq, read)");
_Static_assert(offsetof(struct fi_ops_cq, readfrom) == 16, "offsetof(struct fi_ops_cq, readfrom)");
_Static_assert(offsetof(struct fi_ops_cq, readerr) == 24, "offsetof(struct fi_ops_cq, readerr)");
_Static_assert(offsetof(struct fi_ops_cq, sread) == 32, "offsetof(struct fi_ops_cq, sread)");
_Static_assert(offsetof(struct fi_ops_cq, sreadfrom) == 40, "offsetof(struct fi_ops_cq, sreadfrom)");
_Static_assert(offsetof(struct fi_ops_cq, signal) == 48, "offsetof(struct fi_ops_cq, signal)");
_Static_assert(offsetof(struct fi_ops_cq, strerror) == 56, "offsetof(struct fi_ops_cq, strerror)");
_Static_assert(sizeof(struct fid_cq) == 32, "sizeof(struct fid_cq)");
_Static_assert(offsetof(struct fid_cq, fid) == 0, "offsetof(struct fid_cq, fid)");
_Static_assert(offsetof(struct fid_cq, ops) == 24, "offsetof(struct fid_cq, ops)");
_Static_assert(sizeof(struct fi_cntr_attr) == 24, "sizeof(struct fi_cntr_attr)");
_Static_assert(offsetof(struct fi_cntr_attr, events) == 0, "offsetof(struct fi_cntr_attr, events)");
_Static_assert(offsetof(struct fi_cntr_attr, wait_obj) == 4, "offsetof(struct fi_cntr_attr, wait_obj)");
_Static_assert(offsetof(struct fi_cntr_attr, wait_set) == 8, "offsetof(struct fi_cntr_attr, wait_set)");
_Static_assert(offsetof(struct fi_cntr_attr, flags) == 16, "offsetof(struct fi_cntr_attr, flags)");
_Static_assert(sizeof(struct fid_cntr) == 32, "sizeof(struct fid_cntr)");
_Static_assert(offsetof(struct fid_cntr, fid) == 0, "offsetof(struct fid_cntr, fid)");
_Static_assert(offsetof(struct fid_cntr, ops) == 24, "offsetof(struct fid_cntr, ops)");
_Static_assert(sizeof(struct fi_av_attr) == 48, "sizeof(struct fi_av_attr)");
_Static_assert(offsetof(struct fi_av_attr, type) == 0, "offsetof(struct fi_av_attr, type)");
_Static_assert(offsetof(struct fi_av_attr, rx_ctx_bits) == 4, "offsetof(struct fi_av_attr, rx_ctx_bits)");
_Static_assert(offsetof(struct fi_av_attr, count) == 8, "offsetof(struct fi_av_attr, count)");
_Static_assert(offsetof(struct fi_av_attr, ep_per_node) == 16, "offsetof(struct fi_av_attr, ep_per_node)");
_Static_assert(offsetof(struct fi_av_attr, name) == 24, "offsetof(struct fi_av_attr, name)");
_Static_assert(offsetof(struct fi_av_attr, map_addr) == 32, "offsetof(struct fi_av_attr, map_addr)");
_Static_assert(offsetof(struct fi_av_attr, flags) == 40, "offsetof(struct fi_av_attr, flags)");
_Static_assert(sizeof(struct fid_av) == 32, "sizeof(struct fid_av)");
_Static_assert(offsetof(struct fid_av, fid) == 0, "offsetof(struct fid_av, fid)");
_Static_assert(offsetof(struct fid_av, ops) == 24, "offsetof(struct fid_av, ops)");
_Static_assert(sizeof(struct fid_mr) == 40, "sizeof(struct fid_mr)");
_Static_assert(offsetof(struct fid_mr, fid) == 0, "offsetof(struct fid_mr, fid)");
_Static_assert(offsetof(struct fid_mr, mem_desc) == 24, "offsetof(struct fid_mr, mem_desc)");
_Static_assert(offsetof(struct fid_mr, key) == 32, "offsetof(struct fid_mr, key)");
_Static_assert(sizeof(struct fid_domain) == 40, "sizeof(struct fid_domain)");
_Static_assert(offsetof(struct fid_domain, fid) == 0, "offsetof(struct fid_domain, fid)");
_Static_assert(offsetof(struct fid_domain, ops) == 24, "offsetof(struct fid_domain, ops)");
_Static_assert(offsetof(struct fid_domain, mr) == 32, "offsetof(struct fid_domain, mr)");
_Static_assert(sizeof(struct fi_msg) == 48, "sizeof(struct fi_msg)");
_Static_assert(offsetof(struct fi_msg, msg_iov) == 0, "offsetof(struct fi_msg, msg_iov)");
_Static_assert(offsetof(struct fi_msg, desc) == 8, "offsetof(struct fi_msg, desc)");
_Static_assert(offsetof(struct fi_msg, iov_count) == 16, "offsetof(struct fi_msg, iov_count)");
_Static_assert(offsetof(struct fi_msg, addr) == 24, "offsetof(struct fi_msg, addr)");
_Static_assert(offsetof(struct fi_msg, context) == 32, "offsetof(struct fi_msg, context)");
_Static_assert(offsetof(struct fi_msg, data) == 40, "offsetof(struct fi_msg, data)");
_Static_assert(offsetof(struct fi_ops_msg, size) == 0, "offsetof(struct fi_ops_msg, size)");
_Static_assert(offsetof(struct fi_ops_msg, recv) == 8, "offsetof(struct fi_ops_msg, recv)");
_Static_assert(offsetof(struct fi_ops_msg, recvv) == 16, "offsetof(struct fi_ops_msg, recvv)");
_Static_assert(offsetof(struct fi_ops_msg, recvmsg) == 24, "offsetof(struct fi_ops_msg, recvmsg)");
_Static_assert(offsetof(struct fi_ops_msg, send) == 32, "offsetof(struct fi_ops_msg, send)");
_Static_assert(offsetof(struct fi_ops_msg, sendv) == 40, "offsetof(struct fi_ops_msg, sendv)");
_Static_assert(offsetof(struct fi_ops_msg, sendmsg) == 48, "offsetof(struct fi_ops_msg, sendmsg)");
_Static_assert(offsetof(struct fi_ops_msg, inject) == 56, "offsetof(struct fi_ops_msg, inject)");
_Static_assert(offsetof(struct fi_ops_msg, senddata) == 64, "offsetof(struct fi_ops_msg, senddata)");
_Static_assert(offsetof(struct fi_ops_msg, injectdata) == 72, "offsetof(struct fi_ops_msg, injectdata)");
_Static_assert(sizeof(struct fid_ep) == 80, "sizeof(struct fid_ep)");
_Static_assert(offsetof(struct fid_ep, fid) == 0, "offsetof(struct fid_ep, fid)");
_Static_assert(offsetof(struct fid_ep, ops) == 24, "offsetof(struct fid_ep, ops)");
_Static_assert(offsetof(struct fid_ep, cm) == 32, "offsetof(struct fid_ep, cm)");
_Static_assert(offsetof(struct fid_ep, msg) == 40, "offsetof(struct fid_ep, msg)");
_Static_assert(offsetof(struct fid_ep, rma) == 48, "offsetof(struct fid_ep, rma)");
_Static_assert(offsetof(struct fid_ep, tagged) == 56, "offsetof(struct fid_ep, tagged)");
_Static_assert(offsetof(struct fid_ep, atomic) == 64, "offsetof(struct fid_ep, atomic)");
_Static_assert(offsetof(struct fid_ep, collective) == 72, "offsetof(struct fid_ep, collective)");
_Static_assert(sizeof(struct fid_pep) == 40, "sizeof(struct fid_pep)");
_Static_assert(offsetof(struct fid_pep, fid) == 0, "offsetof(struct fid_pep, fid)");
_Static_assert(offsetof(struct fid_pep, ops) == 24, "offsetof(struct fid_pep, ops)");
_Static_assert(offsetof(struct fid_pep, cm) == 32, "offsetof(struct fid_pep, cm)");
_Static_assert(sizeof(struct fi_rma_iov) == 24, "sizeof(struct fi_rma_iov)");
_Static_assert(offsetof(struct fi_rma_iov, addr) == 0, "offsetof(struct fi_rma_iov, addr)");
_Static_assert(offsetof(struct fi_rma_iov, len) == 8, "offsetof(struct fi_rma_iov, len)");
_Static_assert(offsetof(struct fi_rma_iov, key) == 16, "offsetof(struct fi_rma_iov, key)");
_Static_assert(sizeof(struct fi_msg_rma) == 64, "sizeof(struct fi_msg_rma)");
_Static_assert(offsetof(struct fi_msg_rma, msg_iov) == 0, "offsetof(struct fi_msg_rma, msg_iov)");
_Static_assert(offsetof(struct fi_msg_rma, desc) == 8, "offsetof(struct fi_msg_rma, desc)");
_Static_assert(offsetof(struct fi_msg_rma, iov_count) == 16, "offsetof(struct fi_msg_rma, iov_count)");
_Static_assert(offsetof(struct fi_msg_rma, addr) == 24, "offsetof(struct fi_msg_rma, addr)");
_Static_assert(offsetof(struct fi_msg_rma, rma_iov) == 32, "offsetof(struct fi_msg_rma, rma_iov)");
_Static_assert(offsetof(struct fi_msg_rma, rma_iov_count) == 40, "offsetof(struct fi_msg_rma, rma_iov_count)");
_Static_assert(offsetof(struct fi_msg_rma, context) == 48, "offsetof(struct fi_msg_rma, context)");
_Static_assert(offsetof(struct fi_msg_rma, data) == 56, "offsetof(struct fi_msg_rma, data)");
_Static_assert(offsetof(struct fi_ops_rma, size) == 0, "offsetof(struct fi_ops_rma, size)");
_Static_assert(offsetof(struct fi_ops_rma, read) == 8, "offsetof(struct fi_ops_rma, read)");
_Static_assert(offsetof(struct fi_ops_rma, readv) == 16, "offsetof(struct fi_ops_rma, readv)");
_Static_assert(offsetof(struct fi_ops_rma, readmsg) == 24, "offsetof(struct fi_ops_rma, readmsg)");
_Static_assert(offsetof(struct fi_ops_rma, write) == 32, "offsetof(struct fi_ops_rma, write)");
_Static_assert(offsetof(struct fi_ops_rma, writev) == 40, "offsetof(struct fi_ops_rma, writev)");
_Static_assert(offsetof(struct fi_ops_rma, writemsg) == 48, "offsetof(struct fi_ops_rma, writemsg)");
_Static_assert(offsetof(struct fi_ops_rma, inject) == 56, "offsetof(struct fi_ops_rma, inject)");
_Static_assert(offsetof(struct fi_ops_rma, writedata) == 64, "offsetof(struct fi_ops_rma, writedata)");
_Static_assert(offsetof(struct fi_ops_rma, injectdata) == 72, "offsetof(struct fi_ops_rma, injectdata)");
_Static_assert(sizeof(struct fi_msg_tagged) == 64, "sizeof(struct fi_msg_tagged)");
_Static_assert(offsetof(struct fi_msg_tagged, msg_iov) == 0, "offsetof(struct fi_msg_tagged, msg_iov)");
_Static_assert(offsetof(struct fi_msg_tagged, desc) == 8, "offsetof(struct fi_msg_tagged, desc)");
_Static_assert(offsetof(struct fi_msg_tagged, iov_count) == 16, "offsetof(struct fi_msg_tagged, iov_count)");
_Static_assert(offsetof(struct fi_msg_tagged, addr) == 24, "offsetof(struct fi_msg_tagged, addr)");
_Static_assert(offsetof(struct fi_msg_tagged, tag) == 32, "offsetof(struct fi_msg_tagged, tag)");
_Static_assert(offsetof(struct fi_msg_tagged, ignore) == 40, "offsetof(struct fi_msg_tagged, ignore)");
_Static_assert(offsetof(struct fi_msg_tagged, context) == 48, "offsetof(struct fi_msg_tagged, context)");
_Static_assert(offsetof(struct fi_msg_tagged, data) == 56, "offsetof(struct fi_msg_tagged, data)");
