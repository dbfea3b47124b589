/* The structures have the layout of this interface: src/layout_tests.rs has the same numbers. */
#include <fabricast.h>
#include <rgaps.h>

#define IS(name, condition) typedef char name[(condition) ? 1 : -1]
#define AT(type, field, offset) IS(type##_##field, offsetof(type, field) == (offset))

IS(node_options, sizeof(fabricast_node_options) == 120);
AT(fabricast_node_options, service_timeout, 24);
AT(fabricast_node_options, waiting, 52);
AT(fabricast_node_options, workers, 116);
IS(topic_settings, sizeof(fabricast_topic_settings) == 56);
AT(fabricast_topic_settings, reliability, 36);
AT(fabricast_topic_settings, loans, 40);
AT(fabricast_topic_settings, type_name, 48);
IS(sent, sizeof(fabricast_sent) == 24);
IS(counters, sizeof(fabricast_publisher_counters) == 40);
AT(fabricast_publisher_counters, missed_by_nodes, 24);
AT(fabricast_publisher_counters, evicted, 32);
IS(event, sizeof(fabricast_event) == 72);
AT(fabricast_event, held_for, 24);
AT(fabricast_event, node, 32);
IS(sample_info, sizeof(fabricast_sample_info) == 128);
AT(fabricast_sample_info, publisher, 56);
AT(fabricast_sample_info, delivered_at, 120);

int main(void)
{
    return fabricast_abi() == FABRICAST_ABI ? 0 : 1;
}
