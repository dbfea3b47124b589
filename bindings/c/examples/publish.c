/*
 * publish [COUNT] - publishes frames on the topic "frames", and waits until they were read.
 *
 *     cc publish.c $(pkg-config --cflags --libs fabricast) -o publish
 */
#include <fabricast.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 640, HEIGHT = 480 };

/* Metadata of a frame. */
struct about {
    uint32_t width, height;
    uint64_t number;
};

static void check(fabricast_status status)
{
    if (status != FABRICAST_OK) {
        fprintf(stderr, "publish: %s\n", fabricast_error_message());
        exit(1);
    }
}

int main(int count, char **arguments)
{
    unsigned long frames = count > 1 ? strtoul(arguments[1], NULL, 10) : 30, number, readers = 0;
    fabricast_node *node;
    fabricast_topic *topic;
    fabricast_topic_settings settings;
    fabricast_publisher *publisher;

    check(fabricast_node_join(NULL, &node));
    check(fabricast_topic_settings_init(&settings, sizeof settings));
    settings.largest = WIDTH * HEIGHT;
    settings.depth = 4;
    check(fabricast_topic_open(node, "frames", &settings, &topic));
    check(fabricast_publisher_open(topic, &publisher));
    for (number = 0; number < frames; number++) {
        struct about about = {WIDTH, HEIGHT, 0};
        fabricast_loan *loan;
        fabricast_sent sent;
        void *pixels;
        size_t length;

        /* Written in place: nothing is copied. */
        check(fabricast_publisher_loan(publisher, WIDTH * HEIGHT, FABRICAST_SECONDS(30), &loan));
        check(fabricast_loan_memory(loan, &pixels, &length));
        memset(pixels, (int)(number & 0xff), length);
        about.number = number;
        check(fabricast_loan_set_metadata(loan, &about, sizeof about));
        check(fabricast_loan_publish(loan, FABRICAST_SECONDS(30), &sent, sizeof sent));
        readers += (unsigned long)sent.subscribers;
    }
    check(fabricast_publisher_flush(publisher, FABRICAST_SECONDS(30)));
    check(fabricast_publisher_close(publisher));
    check(fabricast_topic_close(topic));
    check(fabricast_node_leave(node));
    printf("publish: %lu frames, read %lu times: ok\n", frames, readers);
    return 0;
}
