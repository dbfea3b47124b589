/*
 * subscribe [COUNT] - reads COUNT frames of the topic "frames", and checks them. Any number of
 * these read the same copy; each prints "ready" when it receives all further messages.
 *
 *     cc subscribe.c $(pkg-config --cflags --libs fabricast) -o subscribe
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
        fprintf(stderr, "subscribe: %s\n", fabricast_error_message());
        exit(1);
    }
}

int main(int count, char **arguments)
{
    unsigned long frames = count > 1 ? strtoul(arguments[1], NULL, 10) : 30, number;
    fabricast_node *node;
    fabricast_topic *topic;
    fabricast_topic_settings settings;
    fabricast_subscriber *subscriber;

    check(fabricast_node_join(NULL, &node));
    check(fabricast_topic_settings_init(&settings, sizeof settings));
    settings.largest = WIDTH * HEIGHT;
    settings.depth = 4;
    check(fabricast_topic_open(node, "frames", &settings, &topic));
    check(fabricast_subscriber_open(topic, &subscriber));
    puts("ready");
    fflush(stdout);
    for (number = 0; number < frames; number++) {
        fabricast_sample *sample;
        fabricast_sample_info info;
        struct about about;
        const unsigned char *pixels;
        size_t at;

        check(fabricast_subscriber_pull(subscriber, FABRICAST_SECONDS(30), &sample));
        check(fabricast_sample_info_of(sample, &info, sizeof info));
        memcpy(&about, info.metadata, sizeof about);
        pixels = info.address;
        for (at = 0; at < (size_t)about.width * about.height; at++) {
            if (about.number != number || pixels[at] != (unsigned char)(number & 0xff)) {
                fprintf(stderr, "subscribe: frame %lu is wrong\n", number);
                return 1;
            }
        }
        check(fabricast_sample_release(sample));
    }
    check(fabricast_subscriber_close(subscriber));
    check(fabricast_topic_close(topic));
    check(fabricast_node_leave(node));
    printf("subscribe: %lu frames: ok\n", frames);
    return 0;
}
