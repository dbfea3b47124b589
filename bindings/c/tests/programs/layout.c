/* The structures have the layout of this interface: src/layout_tests.rs has the same numbers. */
#include <fabricast.h>
#include <rgaps.h>

#define IS(name, condition) typedef char name[(condition) ? 1 : -1]
#define AT(type, field, offset) IS(type##_##field, offsetof(type, field) == (offset))

IS(node_options, sizeof(fabricast_node_options) == 120);
AT(fabricast_node_options, service_timeout, 24);
AT(fabricast_node_options, waiting, 52);
AT(fabricast_node_options, workers, 116);
IS(topic_settings, sizeof(fabricast_topic_settings) == 64);
AT(fabricast_topic_settings, reliability, 36);
AT(fabricast_topic_settings, loans, 40);
AT(fabricast_topic_settings, type_name, 48);
AT(fabricast_topic_settings, max_held, 56);
IS(sent, sizeof(fabricast_sent) == 24);
IS(counters, sizeof(fabricast_publisher_counters) == 40);
AT(fabricast_publisher_counters, missed_by_nodes, 24);
AT(fabricast_publisher_counters, evicted, 32);
IS(event, sizeof(fabricast_event) == 72);
AT(fabricast_event, held_for, 24);
AT(fabricast_event, node, 32);
IS(topic_publisher, sizeof(fabricast_topic_publisher) == 128);
AT(fabricast_topic_publisher, is_alive, 12);
AT(fabricast_topic_publisher, node, 16);
AT(fabricast_topic_publisher, label, 56);
IS(sample_info, sizeof(fabricast_sample_info) == 128);
AT(fabricast_sample_info, publisher, 56);
AT(fabricast_sample_info, delivered_at, 120);
IS(agent_options, sizeof(fabricast_agent_options) == 72);
AT(fabricast_agent_options, lost_after, 40);
AT(fabricast_agent_options, cached_count, 56);
AT(fabricast_agent_options, force_remote, 68);
IS(notice, sizeof(fabricast_notice) == 32);
AT(fabricast_notice, data, 16);
AT(fabricast_notice, length, 24);
IS(block, sizeof(fabricast_block) == 24);
AT(fabricast_block, from, 8);
AT(fabricast_block, length, 16);
IS(range, sizeof(fabricast_range) == 16);
AT(fabricast_range, length, 8);
IS(view, sizeof(fabricast_view) == 24);
AT(fabricast_view, offset, 8);
AT(fabricast_view, length, 16);
IS(part, sizeof(fabricast_part) == 24);
AT(fabricast_part, blocks, 8);
AT(fabricast_part, count, 16);
IS(strided, sizeof(fabricast_strided) == 104);
AT(fabricast_strided, to, 16);
AT(fabricast_strided, count, 32);
AT(fabricast_strided, to_stride, 80);
IS(card_info, sizeof(fabricast_card_info) == 112);
AT(fabricast_card_info, is_same_machine, 88);
IS(agent_event, sizeof(fabricast_agent_event) == 4480);
AT(fabricast_agent_event, from, 40);
AT(fabricast_agent_event, data, 56);
AT(fabricast_agent_event, label, 4152);
AT(fabricast_agent_event, reason, 4224);
IS(tensor, sizeof(fabricast_tensor) == 40);
AT(fabricast_tensor, type_code, 8);
AT(fabricast_tensor, lanes, 10);
AT(fabricast_tensor, dimensions, 12);
AT(fabricast_tensor, strides, 24);
AT(fabricast_tensor, byte_offset, 32);
IS(domain_options, sizeof(fabricast_domain_options) == 128);
AT(fabricast_domain_options, ranks, 24);
AT(fabricast_domain_options, topology_hash, 56);
AT(fabricast_domain_options, waiting, 80);
AT(fabricast_domain_options, parameters, 112);
IS(parameters, sizeof(fabricast_parameters) == 16);
AT(fabricast_parameters, algorithm, 12);
IS(param_entry, sizeof(fabricast_param_entry) == 40);
AT(fabricast_param_entry, parameters, 24);
IS(exec_stat, sizeof(fabricast_exec_stat) == 40);
AT(fabricast_exec_stat, success, 32);

int main(void)
{
    return fabricast_abi() == FABRICAST_ABI ? 0 : 1;
}
