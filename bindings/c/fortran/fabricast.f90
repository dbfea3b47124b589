! fabricast - topics and agents for Fortran 2018, by the functions of fabricast.h, which documents
! them. Names, order of arguments and results are those of C, with these differences:
!
! - Handles are types of their own, so that the compiler finds a handle of another kind.
! - Texts are Fortran strings. Trailing blanks do not count. fabricast_message() returns the text of
!   the last error, fabricast_text() that of a component such as event%label.
! - Arguments that may be NULL are optional. Options and settings are optional arguments, too.
! - Lists of blocks, cards and descriptors are arrays, without an argument for their length.
! - Numbers without a sign in C have one here, with the same bits.
!
!     use fabricast
!     type(fabricast_agent) :: agent
!     if (fabricast_agent_start(agent, label='solver') /= FABRICAST_OK) then
!         error stop fabricast_message()
!     end if
!
! An array that transfers read or write while the program continues should have the attributes
! target and asynchronous. Collective operations are in the module fabricast_collective.
module fabricast
    use, intrinsic :: iso_c_binding
    implicit none
    private

    ! --------------------------------------------------------------------------- constants

    integer(c_int32_t), parameter, public :: FABRICAST_OK = 0
    integer(c_int32_t), parameter, public :: FABRICAST_E_FAILED = -1
    integer(c_int32_t), parameter, public :: FABRICAST_E_INVALID_ARGUMENT = -2
    integer(c_int32_t), parameter, public :: FABRICAST_E_SETTINGS_DIFFER = -3
    integer(c_int32_t), parameter, public :: FABRICAST_E_NOT_FOUND = -4
    integer(c_int32_t), parameter, public :: FABRICAST_E_OVER_BUDGET = -5
    integer(c_int32_t), parameter, public :: FABRICAST_E_TOO_LONG = -6
    integer(c_int32_t), parameter, public :: FABRICAST_E_TOO_MANY = -7
    integer(c_int32_t), parameter, public :: FABRICAST_E_WOULD_BLOCK = -8
    integer(c_int32_t), parameter, public :: FABRICAST_E_DEADLINE_EXCEEDED = -9
    integer(c_int32_t), parameter, public :: FABRICAST_E_EVICTED = -10
    integer(c_int32_t), parameter, public :: FABRICAST_E_DENIED = -11
    integer(c_int32_t), parameter, public :: FABRICAST_E_MALFORMED = -12
    integer(c_int32_t), parameter, public :: FABRICAST_E_VERSION_MISMATCH = -13
    integer(c_int32_t), parameter, public :: FABRICAST_E_CLOSED = -14
    integer(c_int32_t), parameter, public :: FABRICAST_E_FORKED = -15
    integer(c_int32_t), parameter, public :: FABRICAST_E_BAD_HANDLE = -16
    integer(c_int32_t), parameter, public :: FABRICAST_E_PANICKED = -17
    integer(c_int32_t), parameter, public :: FABRICAST_E_POISONED = -18
    integer(c_int32_t), parameter, public :: FABRICAST_E_TOO_MANY_LOANS = -19
    integer(c_int32_t), parameter, public :: FABRICAST_E_TOO_MANY_SAMPLES = -20
    integer(c_int32_t), parameter, public :: FABRICAST_E_NO_PROVIDER = -21
    integer(c_int32_t), parameter, public :: FABRICAST_E_INTERRUPTED = -22
    integer(c_int32_t), parameter, public :: FABRICAST_E_NO_PATH = -23
    integer(c_int32_t), parameter, public :: FABRICAST_E_STALE = -24
    integer(c_int32_t), parameter, public :: FABRICAST_E_CANCELLED = -25
    integer(c_int32_t), parameter, public :: FABRICAST_E_NO_PUBLISHERS = -26
    integer(c_int32_t), parameter, public :: FABRICAST_E_RANK_FAILED = -27
    integer(c_int32_t), parameter, public :: FABRICAST_E_MISMATCH = -28

    integer(c_int64_t), parameter, public :: FABRICAST_NOW = 0
    integer(c_int64_t), parameter, public :: FABRICAST_FOREVER = -1

    integer(c_int32_t), parameter, public :: FABRICAST_WAITING_ADAPTIVE = 0
    integer(c_int32_t), parameter, public :: FABRICAST_WAITING_BUSY = 1
    integer(c_int32_t), parameter, public :: FABRICAST_WAITING_BLOCK = 2

    integer(c_int32_t), parameter, public :: FABRICAST_RELIABLE = 0
    integer(c_int32_t), parameter, public :: FABRICAST_DROP_OLDEST = 1
    integer(c_int32_t), parameter, public :: FABRICAST_DROP_NEWEST = 2

    integer(c_int64_t), parameter, public :: FABRICAST_LOCAL_ONLY = 0
    integer(c_int64_t), parameter, public :: FABRICAST_READ = 1
    integer(c_int64_t), parameter, public :: FABRICAST_WRITE = 2

    integer, parameter, public :: FABRICAST_MAX_NOTICE = 4096
    integer, parameter, public :: FABRICAST_MAX_STRIDES = 3
    integer(c_int32_t), parameter :: ORDER_FORTRAN = 1

    integer(c_int64_t), parameter, public :: FABRICAST_AGENT_EVENT_JOINED = 1
    integer(c_int64_t), parameter, public :: FABRICAST_AGENT_EVENT_NOTICE = 2
    integer(c_int64_t), parameter, public :: FABRICAST_AGENT_EVENT_LEFT = 3
    integer(c_int64_t), parameter, public :: FABRICAST_AGENT_EVENT_RAIL_LOST = 4
    integer(c_int64_t), parameter, public :: FABRICAST_AGENT_EVENT_RAIL_RESTORED = 5

    ! ----------------------------------------------------------------------------- handles

    type, bind(c), public :: fabricast_node
        type(c_ptr) :: handle = c_null_ptr
    end type

    type, bind(c), public :: fabricast_topic
        type(c_ptr) :: handle = c_null_ptr
    end type

    type, bind(c), public :: fabricast_publisher
        type(c_ptr) :: handle = c_null_ptr
    end type

    type, bind(c), public :: fabricast_subscriber
        type(c_ptr) :: handle = c_null_ptr
    end type

    type, bind(c), public :: fabricast_sample
        type(c_ptr) :: handle = c_null_ptr
    end type

    type, bind(c), public :: fabricast_memory
        type(c_ptr) :: handle = c_null_ptr
    end type

    type, bind(c), public :: fabricast_agent
        type(c_ptr) :: handle = c_null_ptr
    end type

    type, bind(c), public :: fabricast_region
        type(c_ptr) :: handle = c_null_ptr
    end type

    type, bind(c), public :: fabricast_route
        type(c_ptr) :: handle = c_null_ptr
    end type

    type, bind(c), public :: fabricast_prepared
        type(c_ptr) :: handle = c_null_ptr
    end type

    ! -------------------------------------------------------------------------- structures

    type, bind(c), public :: fabricast_block
        integer(c_int64_t) :: to = 0
        integer(c_int64_t) :: from = 0
        integer(c_int64_t) :: length = 0
    end type

    ! fabricast_part(route, c_loc(blocks), size(blocks))
    type, bind(c), public :: fabricast_part
        type(fabricast_route) :: route
        type(c_ptr) :: blocks = c_null_ptr
        integer(c_size_t) :: count = 0
    end type

    type, bind(c), public :: fabricast_notice
        integer(c_size_t) :: size = 32
        integer(c_int64_t) :: tag = 0
        type(c_ptr) :: data = c_null_ptr
        integer(c_size_t) :: length = 0
    end type

    ! Offsets are in bytes, from 0 on.
    type, bind(c), public :: fabricast_strided
        integer(c_size_t) :: size = 104
        integer(c_int64_t) :: from = 0
        integer(c_int64_t) :: to = 0
        integer(c_int64_t) :: length = 0
        integer(c_int64_t) :: count(FABRICAST_MAX_STRIDES) = 1
        integer(c_int64_t) :: from_stride(FABRICAST_MAX_STRIDES) = 0
        integer(c_int64_t) :: to_stride(FABRICAST_MAX_STRIDES) = 0
    end type

    type, bind(c), public :: fabricast_card_info
        integer(c_int8_t) :: identity(16)
        character(kind=c_char) :: label(72)
        integer(c_int64_t) :: is_same_machine
        integer(c_int64_t) :: fabrics
        integer(c_int64_t) :: regions
    end type

    type, bind(c), public :: fabricast_agent_event
        integer(c_int64_t) :: kind
        integer(c_int64_t) :: tag
        integer(c_int64_t) :: length
        integer(c_int64_t) :: rail
        integer(c_int64_t) :: is_dead
        integer(c_int8_t) :: from(16)
        integer(c_int8_t) :: data(FABRICAST_MAX_NOTICE)
        character(kind=c_char) :: label(72)
        character(kind=c_char) :: reason(256)
    end type

    type, bind(c) :: agent_options
        integer(c_size_t) :: size
        type(c_ptr) :: label, directory, fabric, source
        integer(c_int64_t) :: lost_after, cached_bytes
        integer(c_int32_t) :: cached_count, rails, waiting, force_remote
    end type

    type, bind(c) :: node_options
        integer(c_size_t) :: size
        type(c_ptr) :: directory, label
        integer(c_int64_t) :: service_timeout, host_budget, device_budget
        integer(c_int32_t) :: service, waiting
        type(c_ptr) :: listen, peers, rendezvous, name, provider, source
        integer(c_int64_t) :: lost_after
        integer(c_int32_t) :: insecure, workers
    end type

    type, bind(c) :: topic_settings
        integer(c_size_t) :: size
        type(c_ptr) :: memory
        integer(c_int64_t) :: largest, release_deadline
        integer(c_int32_t) :: depth, reliability
        integer(c_int64_t) :: loans
        type(c_ptr) :: type_name
    end type

    ! ------------------------------------------------- functions that C and Fortran share

    public :: fabricast_error_status, fabricast_error_clear, fabricast_abi, fabricast_open_handles
    public :: fabricast_node_leave, fabricast_topic_close
    public :: fabricast_publisher_open, fabricast_publisher_close, fabricast_publisher_push
    public :: fabricast_publisher_wait_for_subscribers, fabricast_publisher_flush
    public :: fabricast_subscriber_open, fabricast_subscriber_close, fabricast_subscriber_pull
    public :: fabricast_sample_memory, fabricast_sample_read, fabricast_sample_check
    public :: fabricast_sample_release
    public :: fabricast_memory_address, fabricast_memory_write, fabricast_memory_read
    public :: fabricast_memory_close
    public :: fabricast_agent_close, fabricast_region_register, fabricast_agent_withdraw
    public :: fabricast_region_close, fabricast_agent_disconnect, fabricast_route_close
    public :: fabricast_agent_put_all, fabricast_agent_get_all
    public :: fabricast_agent_put_strided, fabricast_agent_get_strided
    public :: fabricast_agent_notify, fabricast_agent_notify_ordered
    public :: fabricast_agent_fence, fabricast_agent_flush, fabricast_agent_progress
    public :: fabricast_agent_test, fabricast_agent_wait, fabricast_agent_forget
    public :: fabricast_agent_in_flight, fabricast_agent_cancel
    public :: fabricast_prepared_bytes, fabricast_prepared_close

    interface
        function fabricast_error_status() result(status) bind(c)
            import :: c_int32_t
            integer(c_int32_t) :: status
        end function

        subroutine fabricast_error_clear() bind(c)
        end subroutine

        function fabricast_abi() result(number) bind(c)
            import :: c_int32_t
            integer(c_int32_t) :: number
        end function

        function fabricast_open_handles() result(count) bind(c)
            import :: c_size_t
            integer(c_size_t) :: count
        end function

        function fabricast_node_leave(node) result(status) bind(c)
            import :: c_int32_t, fabricast_node
            type(fabricast_node), value :: node
            integer(c_int32_t) :: status
        end function

        function fabricast_topic_close(topic) result(status) bind(c)
            import :: c_int32_t, fabricast_topic
            type(fabricast_topic), value :: topic
            integer(c_int32_t) :: status
        end function

        function fabricast_publisher_open(topic, publisher) result(status) bind(c)
            import :: c_int32_t, fabricast_topic, fabricast_publisher
            type(fabricast_topic), value :: topic
            type(fabricast_publisher), intent(out) :: publisher
            integer(c_int32_t) :: status
        end function

        function fabricast_publisher_close(publisher) result(status) bind(c)
            import :: c_int32_t, fabricast_publisher
            type(fabricast_publisher), value :: publisher
            integer(c_int32_t) :: status
        end function

        ! The length is in bytes.
        function fabricast_publisher_push(publisher, data, length, timeout) result(status) bind(c)
            import :: c_int32_t, c_int64_t, c_size_t, fabricast_publisher
            type(fabricast_publisher), value :: publisher
            type(*), intent(in) :: data(*)
            integer(c_size_t), value :: length
            integer(c_int64_t), value :: timeout
            integer(c_int32_t) :: status
        end function

        function fabricast_publisher_wait_for_subscribers(publisher, count, timeout) &
            result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_publisher
            type(fabricast_publisher), value :: publisher
            integer(c_int64_t), value :: count, timeout
            integer(c_int32_t) :: status
        end function

        function fabricast_publisher_flush(publisher, timeout) result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_publisher
            type(fabricast_publisher), value :: publisher
            integer(c_int64_t), value :: timeout
            integer(c_int32_t) :: status
        end function

        function fabricast_subscriber_open(topic, subscriber) result(status) bind(c)
            import :: c_int32_t, fabricast_topic, fabricast_subscriber
            type(fabricast_topic), value :: topic
            type(fabricast_subscriber), intent(out) :: subscriber
            integer(c_int32_t) :: status
        end function

        function fabricast_subscriber_close(subscriber) result(status) bind(c)
            import :: c_int32_t, fabricast_subscriber
            type(fabricast_subscriber), value :: subscriber
            integer(c_int32_t) :: status
        end function

        function fabricast_subscriber_pull(subscriber, timeout, sample) result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_subscriber, fabricast_sample
            type(fabricast_subscriber), value :: subscriber
            integer(c_int64_t), value :: timeout
            type(fabricast_sample), intent(out) :: sample
            integer(c_int32_t) :: status
        end function

        ! c_f_pointer makes an array of the address.
        function fabricast_sample_memory(sample, address, length) result(status) bind(c)
            import :: c_int32_t, c_ptr, c_size_t, fabricast_sample
            type(fabricast_sample), value :: sample
            type(c_ptr), intent(out) :: address
            integer(c_size_t), intent(out) :: length
            integer(c_int32_t) :: status
        end function

        function fabricast_sample_read(sample, offset, into, length) result(status) bind(c)
            import :: c_int32_t, c_size_t, fabricast_sample
            type(fabricast_sample), value :: sample
            integer(c_size_t), value :: offset
            type(*), intent(inout) :: into(*)
            integer(c_size_t), value :: length
            integer(c_int32_t) :: status
        end function

        function fabricast_sample_check(sample) result(status) bind(c)
            import :: c_int32_t, fabricast_sample
            type(fabricast_sample), value :: sample
            integer(c_int32_t) :: status
        end function

        function fabricast_sample_release(sample) result(status) bind(c)
            import :: c_int32_t, fabricast_sample
            type(fabricast_sample), value :: sample
            integer(c_int32_t) :: status
        end function

        function fabricast_memory_address(memory, address, length) result(status) bind(c)
            import :: c_int32_t, c_ptr, c_size_t, fabricast_memory
            type(fabricast_memory), value :: memory
            type(c_ptr), intent(out) :: address
            integer(c_size_t), intent(out) :: length
            integer(c_int32_t) :: status
        end function

        function fabricast_memory_write(memory, offset, data, length) result(status) bind(c)
            import :: c_int32_t, c_size_t, fabricast_memory
            type(fabricast_memory), value :: memory
            integer(c_size_t), value :: offset
            type(*), intent(in) :: data(*)
            integer(c_size_t), value :: length
            integer(c_int32_t) :: status
        end function

        function fabricast_memory_read(memory, offset, into, length) result(status) bind(c)
            import :: c_int32_t, c_size_t, fabricast_memory
            type(fabricast_memory), value :: memory
            integer(c_size_t), value :: offset
            type(*), intent(inout) :: into(*)
            integer(c_size_t), value :: length
            integer(c_int32_t) :: status
        end function

        function fabricast_memory_close(memory, timeout) result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_memory
            type(fabricast_memory), value :: memory
            integer(c_int64_t), value :: timeout
            integer(c_int32_t) :: status
        end function

        function fabricast_agent_close(agent, timeout) result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_agent
            type(fabricast_agent), value :: agent
            integer(c_int64_t), value :: timeout
            integer(c_int32_t) :: status
        end function

        function fabricast_region_register(agent, memory, rights, region) result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_agent, fabricast_memory, fabricast_region
            type(fabricast_agent), value :: agent
            type(fabricast_memory), value :: memory
            integer(c_int64_t), value :: rights
            type(fabricast_region), intent(out) :: region
            integer(c_int32_t) :: status
        end function

        function fabricast_agent_withdraw(agent, region, timeout) result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_agent, fabricast_region
            type(fabricast_agent), value :: agent
            type(fabricast_region), value :: region
            integer(c_int64_t), value :: timeout
            integer(c_int32_t) :: status
        end function

        function fabricast_region_close(region) result(status) bind(c)
            import :: c_int32_t, fabricast_region
            type(fabricast_region), value :: region
            integer(c_int32_t) :: status
        end function

        function fabricast_agent_disconnect(agent, peer, timeout) result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_agent
            type(fabricast_agent), value :: agent
            integer(c_int64_t), value :: peer, timeout
            integer(c_int32_t) :: status
        end function

        function fabricast_route_close(route) result(status) bind(c)
            import :: c_int32_t, fabricast_route
            type(fabricast_route), value :: route
            integer(c_int32_t) :: status
        end function

        function fabricast_agent_put_all(agent, route, notice, token) result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_agent, fabricast_route, fabricast_notice
            type(fabricast_agent), value :: agent
            type(fabricast_route), value :: route
            type(fabricast_notice), intent(in), optional :: notice
            integer(c_int64_t), intent(out), optional :: token
            integer(c_int32_t) :: status
        end function

        function fabricast_agent_get_all(agent, route, notice, token) result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_agent, fabricast_route, fabricast_notice
            type(fabricast_agent), value :: agent
            type(fabricast_route), value :: route
            type(fabricast_notice), intent(in), optional :: notice
            integer(c_int64_t), intent(out), optional :: token
            integer(c_int32_t) :: status
        end function

        function fabricast_agent_put_strided(agent, route, rows, notice, token) &
            result(status) bind(c)
            import :: c_int32_t, c_int64_t
            import :: fabricast_agent, fabricast_route, fabricast_strided, fabricast_notice
            type(fabricast_agent), value :: agent
            type(fabricast_route), value :: route
            type(fabricast_strided), intent(in) :: rows
            type(fabricast_notice), intent(in), optional :: notice
            integer(c_int64_t), intent(out), optional :: token
            integer(c_int32_t) :: status
        end function

        function fabricast_agent_get_strided(agent, route, rows, notice, token) &
            result(status) bind(c)
            import :: c_int32_t, c_int64_t
            import :: fabricast_agent, fabricast_route, fabricast_strided, fabricast_notice
            type(fabricast_agent), value :: agent
            type(fabricast_route), value :: route
            type(fabricast_strided), intent(in) :: rows
            type(fabricast_notice), intent(in), optional :: notice
            integer(c_int64_t), intent(out), optional :: token
            integer(c_int32_t) :: status
        end function

        function fabricast_agent_notify(agent, peer, notice, token) result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_agent, fabricast_notice
            type(fabricast_agent), value :: agent
            integer(c_int64_t), value :: peer
            type(fabricast_notice), intent(in) :: notice
            integer(c_int64_t), intent(out), optional :: token
            integer(c_int32_t) :: status
        end function

        function fabricast_agent_notify_ordered(agent, peer, notice, token) result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_agent, fabricast_notice
            type(fabricast_agent), value :: agent
            integer(c_int64_t), value :: peer
            type(fabricast_notice), intent(in) :: notice
            integer(c_int64_t), intent(out), optional :: token
            integer(c_int32_t) :: status
        end function

        function fabricast_agent_fence(agent, peer) result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_agent
            type(fabricast_agent), value :: agent
            integer(c_int64_t), value :: peer
            integer(c_int32_t) :: status
        end function

        function fabricast_agent_flush(agent, peer, timeout) result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_agent
            type(fabricast_agent), value :: agent
            integer(c_int64_t), value :: peer, timeout
            integer(c_int32_t) :: status
        end function

        function fabricast_agent_progress(agent, moved) result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_agent
            type(fabricast_agent), value :: agent
            integer(c_int64_t), intent(out), optional :: moved
            integer(c_int32_t) :: status
        end function

        function fabricast_agent_test(agent, token, is_over, bytes) result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_agent
            type(fabricast_agent), value :: agent
            integer(c_int64_t), value :: token
            integer(c_int64_t), intent(out) :: is_over
            integer(c_int64_t), intent(out), optional :: bytes
            integer(c_int32_t) :: status
        end function

        function fabricast_agent_wait(agent, token, timeout, bytes) result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_agent
            type(fabricast_agent), value :: agent
            integer(c_int64_t), value :: token, timeout
            integer(c_int64_t), intent(out), optional :: bytes
            integer(c_int32_t) :: status
        end function

        function fabricast_agent_forget(agent, token) result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_agent
            type(fabricast_agent), value :: agent
            integer(c_int64_t), value :: token
            integer(c_int32_t) :: status
        end function

        function fabricast_agent_in_flight(agent, count) result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_agent
            type(fabricast_agent), value :: agent
            integer(c_int64_t), intent(out) :: count
            integer(c_int32_t) :: status
        end function

        function fabricast_agent_cancel(agent, token, is_cancelled) result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_agent
            type(fabricast_agent), value :: agent
            integer(c_int64_t), value :: token
            integer(c_int64_t), intent(out), optional :: is_cancelled
            integer(c_int32_t) :: status
        end function

        function fabricast_prepared_bytes(prepared, bytes) result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_prepared
            type(fabricast_prepared), value :: prepared
            integer(c_int64_t), intent(out) :: bytes
            integer(c_int32_t) :: status
        end function

        function fabricast_prepared_close(prepared) result(status) bind(c)
            import :: c_int32_t, fabricast_prepared
            type(fabricast_prepared), value :: prepared
            integer(c_int32_t) :: status
        end function
    end interface

    ! ------------------------------------------------- functions that differ from those of C

    public :: fabricast_milliseconds, fabricast_seconds
    public :: fabricast_message, fabricast_operation, fabricast_status_name, fabricast_version
    public :: fabricast_text
    public :: fabricast_node_join, fabricast_topic_open
    public :: fabricast_memory_allocate, fabricast_memory_adopt
    public :: fabricast_agent_start, fabricast_agent_card, fabricast_card_info_of
    public :: fabricast_region_descriptor, fabricast_agent_publish
    public :: fabricast_agent_connect, fabricast_agent_join, fabricast_agent_route_to
    public :: fabricast_route_path, fabricast_route_fallback, fabricast_route_explain
    public :: fabricast_agent_put, fabricast_agent_get
    public :: fabricast_agent_put_parts, fabricast_agent_get_parts
    public :: fabricast_agent_prepare_put, fabricast_agent_prepare_get, fabricast_agent_submit

    ! Of all blocks, or of those with these indices, from 0 on.
    interface fabricast_agent_submit
        module procedure submit_all, submit_selected
    end interface
    public :: fabricast_strided_tile, fabricast_agent_next_event

    interface
        function c_strlen(text) result(length) bind(c, name='strlen')
            import :: c_ptr, c_size_t
            type(c_ptr), value :: text
            integer(c_size_t) :: length
        end function

        function c_message() result(text) bind(c, name='fabricast_error_message')
            import :: c_ptr
            type(c_ptr) :: text
        end function

        function c_operation() result(text) bind(c, name='fabricast_error_operation')
            import :: c_ptr
            type(c_ptr) :: text
        end function

        function c_status_name(status) result(text) bind(c, name='fabricast_status_name')
            import :: c_int32_t, c_ptr
            integer(c_int32_t), value :: status
            type(c_ptr) :: text
        end function

        function c_version() result(text) bind(c, name='fabricast_version')
            import :: c_ptr
            type(c_ptr) :: text
        end function

        function c_node_options_init(options, size) result(status) &
            bind(c, name='fabricast_node_options_init')
            import :: c_int32_t, c_size_t, node_options
            type(node_options), intent(out) :: options
            integer(c_size_t), value :: size
            integer(c_int32_t) :: status
        end function

        function c_node_join(options, node) result(status) bind(c, name='fabricast_node_join')
            import :: c_int32_t, node_options, fabricast_node
            type(node_options), intent(in) :: options
            type(fabricast_node), intent(out) :: node
            integer(c_int32_t) :: status
        end function

        function c_topic_settings_init(settings, size) result(status) &
            bind(c, name='fabricast_topic_settings_init')
            import :: c_int32_t, c_size_t, topic_settings
            type(topic_settings), intent(out) :: settings
            integer(c_size_t), value :: size
            integer(c_int32_t) :: status
        end function

        function c_topic_open(node, name, settings, topic) result(status) &
            bind(c, name='fabricast_topic_open')
            import :: c_char, c_int32_t, topic_settings, fabricast_node, fabricast_topic
            type(fabricast_node), value :: node
            character(kind=c_char), intent(in) :: name(*)
            type(topic_settings), intent(in), optional :: settings
            type(fabricast_topic), intent(out) :: topic
            integer(c_int32_t) :: status
        end function

        function c_memory_allocate(location, length, memory) result(status) &
            bind(c, name='fabricast_memory_allocate')
            import :: c_char, c_int32_t, c_size_t, fabricast_memory
            character(kind=c_char), intent(in) :: location(*)
            integer(c_size_t), value :: length
            type(fabricast_memory), intent(out) :: memory
            integer(c_int32_t) :: status
        end function

        function c_memory_adopt(pointer, length, memory) result(status) &
            bind(c, name='fabricast_memory_adopt')
            import :: c_int32_t, c_ptr, c_size_t, fabricast_memory
            type(c_ptr), value :: pointer
            integer(c_size_t), value :: length
            type(fabricast_memory), intent(out) :: memory
            integer(c_int32_t) :: status
        end function

        function c_agent_options_init(options, size) result(status) &
            bind(c, name='fabricast_agent_options_init')
            import :: c_int32_t, c_size_t, agent_options
            type(agent_options), intent(out) :: options
            integer(c_size_t), value :: size
            integer(c_int32_t) :: status
        end function

        function c_agent_start(options, agent) result(status) bind(c, name='fabricast_agent_start')
            import :: c_int32_t, agent_options, fabricast_agent
            type(agent_options), intent(in) :: options
            type(fabricast_agent), intent(out) :: agent
            integer(c_int32_t) :: status
        end function

        function c_agent_card(agent, buffer, capacity, length) result(status) &
            bind(c, name='fabricast_agent_card')
            import :: c_int8_t, c_int32_t, c_size_t, fabricast_agent
            type(fabricast_agent), value :: agent
            integer(c_int8_t), intent(inout), optional :: buffer(*)
            integer(c_size_t), value :: capacity
            integer(c_size_t), intent(out) :: length
            integer(c_int32_t) :: status
        end function

        function c_card_info_of(card, length, info, size) result(status) &
            bind(c, name='fabricast_card_info_of')
            import :: c_int8_t, c_int32_t, c_size_t, fabricast_card_info
            integer(c_int8_t), intent(in) :: card(*)
            integer(c_size_t), value :: length
            type(fabricast_card_info), intent(out) :: info
            integer(c_size_t), value :: size
            integer(c_int32_t) :: status
        end function

        function c_region_descriptor(region, buffer, capacity, length) result(status) &
            bind(c, name='fabricast_region_descriptor')
            import :: c_int8_t, c_int32_t, c_size_t, fabricast_region
            type(fabricast_region), value :: region
            integer(c_int8_t), intent(inout), optional :: buffer(*)
            integer(c_size_t), value :: capacity
            integer(c_size_t), intent(out) :: length
            integer(c_int32_t) :: status
        end function

        function c_agent_put(agent, route, blocks, count, notice, token) result(status) &
            bind(c, name='fabricast_agent_put')
            import :: c_int32_t, c_int64_t, c_size_t
            import :: fabricast_agent, fabricast_route, fabricast_block, fabricast_notice
            type(fabricast_agent), value :: agent
            type(fabricast_route), value :: route
            type(fabricast_block), intent(in) :: blocks(*)
            integer(c_size_t), value :: count
            type(fabricast_notice), intent(in), optional :: notice
            integer(c_int64_t), intent(out), optional :: token
            integer(c_int32_t) :: status
        end function

        function c_agent_get(agent, route, blocks, count, notice, token) result(status) &
            bind(c, name='fabricast_agent_get')
            import :: c_int32_t, c_int64_t, c_size_t
            import :: fabricast_agent, fabricast_route, fabricast_block, fabricast_notice
            type(fabricast_agent), value :: agent
            type(fabricast_route), value :: route
            type(fabricast_block), intent(in) :: blocks(*)
            integer(c_size_t), value :: count
            type(fabricast_notice), intent(in), optional :: notice
            integer(c_int64_t), intent(out), optional :: token
            integer(c_int32_t) :: status
        end function

        function c_agent_put_parts(agent, parts, count, notice, token) result(status) &
            bind(c, name='fabricast_agent_put_parts')
            import :: c_int32_t, c_int64_t, c_size_t
            import :: fabricast_agent, fabricast_part, fabricast_notice
            type(fabricast_agent), value :: agent
            type(fabricast_part), intent(in) :: parts(*)
            integer(c_size_t), value :: count
            type(fabricast_notice), intent(in), optional :: notice
            integer(c_int64_t), intent(out), optional :: token
            integer(c_int32_t) :: status
        end function

        function c_agent_get_parts(agent, parts, count, notice, token) result(status) &
            bind(c, name='fabricast_agent_get_parts')
            import :: c_int32_t, c_int64_t, c_size_t
            import :: fabricast_agent, fabricast_part, fabricast_notice
            type(fabricast_agent), value :: agent
            type(fabricast_part), intent(in) :: parts(*)
            integer(c_size_t), value :: count
            type(fabricast_notice), intent(in), optional :: notice
            integer(c_int64_t), intent(out), optional :: token
            integer(c_int32_t) :: status
        end function

        function c_agent_prepare_put(agent, route, blocks, count, prepared) result(status) &
            bind(c, name='fabricast_agent_prepare_put')
            import :: c_int32_t, c_size_t
            import :: fabricast_agent, fabricast_route, fabricast_block, fabricast_prepared
            type(fabricast_agent), value :: agent
            type(fabricast_route), value :: route
            type(fabricast_block), intent(in) :: blocks(*)
            integer(c_size_t), value :: count
            type(fabricast_prepared), intent(out) :: prepared
            integer(c_int32_t) :: status
        end function

        function c_agent_prepare_get(agent, route, blocks, count, prepared) result(status) &
            bind(c, name='fabricast_agent_prepare_get')
            import :: c_int32_t, c_size_t
            import :: fabricast_agent, fabricast_route, fabricast_block, fabricast_prepared
            type(fabricast_agent), value :: agent
            type(fabricast_route), value :: route
            type(fabricast_block), intent(in) :: blocks(*)
            integer(c_size_t), value :: count
            type(fabricast_prepared), intent(out) :: prepared
            integer(c_int32_t) :: status
        end function

        function c_agent_submit(agent, prepared, indices, count, notice, token) result(status) &
            bind(c, name='fabricast_agent_submit')
            import :: c_int32_t, c_int64_t, c_size_t
            import :: fabricast_agent, fabricast_prepared, fabricast_notice
            type(fabricast_agent), value :: agent
            type(fabricast_prepared), value :: prepared
            integer(c_int32_t), intent(in), optional :: indices(*)
            integer(c_size_t), value :: count
            type(fabricast_notice), intent(in), optional :: notice
            integer(c_int64_t), intent(out), optional :: token
            integer(c_int32_t) :: status
        end function

        function c_agent_publish(agent, name, region) result(status) &
            bind(c, name='fabricast_agent_publish')
            import :: c_char, c_int32_t, fabricast_agent, fabricast_region
            type(fabricast_agent), value :: agent
            character(kind=c_char), intent(in) :: name(*)
            type(fabricast_region), value :: region
            integer(c_int32_t) :: status
        end function

        function c_agent_connect(agent, card, length, timeout, peer) result(status) &
            bind(c, name='fabricast_agent_connect')
            import :: c_int8_t, c_int32_t, c_int64_t, c_size_t, fabricast_agent
            type(fabricast_agent), value :: agent
            integer(c_int8_t), intent(in) :: card(*)
            integer(c_size_t), value :: length
            integer(c_int64_t), value :: timeout
            integer(c_int64_t), intent(out) :: peer
            integer(c_int32_t) :: status
        end function

        function c_agent_join(agent, peer, local, descriptor, length, policy, timeout, route) &
            result(status) bind(c, name='fabricast_agent_join')
            import :: c_char, c_int8_t, c_int32_t, c_int64_t, c_size_t
            import :: fabricast_agent, fabricast_region, fabricast_route
            type(fabricast_agent), value :: agent
            integer(c_int64_t), value :: peer
            type(fabricast_region), value :: local
            integer(c_int8_t), intent(in) :: descriptor(*)
            integer(c_size_t), value :: length
            character(kind=c_char), intent(in) :: policy(*)
            integer(c_int64_t), value :: timeout
            type(fabricast_route), intent(out) :: route
            integer(c_int32_t) :: status
        end function

        function c_agent_route_to(agent, peer, name, local, timeout, route) result(status) &
            bind(c, name='fabricast_agent_route_to')
            import :: c_char, c_int32_t, c_int64_t
            import :: fabricast_agent, fabricast_region, fabricast_route
            type(fabricast_agent), value :: agent
            integer(c_int64_t), value :: peer
            character(kind=c_char), intent(in) :: name(*)
            type(fabricast_region), value :: local
            integer(c_int64_t), value :: timeout
            type(fabricast_route), intent(out) :: route
            integer(c_int32_t) :: status
        end function

        function c_route_path(route, text) result(status) bind(c, name='fabricast_route_path')
            import :: c_int32_t, c_ptr, fabricast_route
            type(fabricast_route), value :: route
            type(c_ptr), intent(out) :: text
            integer(c_int32_t) :: status
        end function

        function c_route_fallback(route, text) result(status) &
            bind(c, name='fabricast_route_fallback')
            import :: c_int32_t, c_ptr, fabricast_route
            type(fabricast_route), value :: route
            type(c_ptr), intent(out) :: text
            integer(c_int32_t) :: status
        end function

        function c_route_explain(route, text) result(status) bind(c, name='fabricast_route_explain')
            import :: c_int32_t, c_ptr, fabricast_route
            type(fabricast_route), value :: route
            type(c_ptr), intent(out) :: text
            integer(c_int32_t) :: status
        end function

        function c_strided_tile(strided, size, order, element, dimensions, tile, from_extents, &
                                from_origin, to_extents, to_origin) result(status) &
            bind(c, name='fabricast_strided_tile')
            import :: c_int32_t, c_int64_t, c_size_t, fabricast_strided
            type(fabricast_strided), intent(out) :: strided
            integer(c_size_t), value :: size
            integer(c_int32_t), value :: order
            integer(c_int64_t), value :: element
            integer(c_size_t), value :: dimensions
            integer(c_int64_t), intent(in) :: tile(*), from_extents(*), from_origin(*)
            integer(c_int64_t), intent(in) :: to_extents(*), to_origin(*)
            integer(c_int32_t) :: status
        end function

        function c_agent_next_event(agent, timeout, event, size) result(status) &
            bind(c, name='fabricast_agent_next_event')
            import :: c_int32_t, c_int64_t, c_size_t, fabricast_agent, fabricast_agent_event
            type(fabricast_agent), value :: agent
            integer(c_int64_t), value :: timeout
            type(fabricast_agent_event), intent(out) :: event
            integer(c_size_t), value :: size
            integer(c_int32_t) :: status
        end function
    end interface

contains

    pure function fabricast_milliseconds(count) result(timeout)
        integer, intent(in) :: count
        integer(c_int64_t) :: timeout
        timeout = int(count, c_int64_t) * 1000000
    end function

    pure function fabricast_seconds(count) result(timeout)
        integer, intent(in) :: count
        integer(c_int64_t) :: timeout
        timeout = int(count, c_int64_t) * 1000000000
    end function

    ! ------------------------------------------------------------------------------- texts

    ! A text of C as a Fortran string; empty for NULL.
    function text_of(text) result(string)
        type(c_ptr), intent(in) :: text
        character(:), allocatable :: string
        character(kind=c_char), pointer :: characters(:)
        integer :: at

        if (.not. c_associated(text)) then
            string = ''
            return
        end if
        call c_f_pointer(text, characters, [c_strlen(text)])
        allocate (character(size(characters)) :: string)
        do at = 1, size(characters)
            string(at:at) = characters(at)
        end do
    end function

    ! A zero-terminated component, such as event%label, as a Fortran string.
    pure function fabricast_text(characters) result(string)
        character(kind=c_char), intent(in) :: characters(:)
        character(:), allocatable :: string
        integer :: length, at

        length = 0
        do while (length < size(characters))
            if (characters(length + 1) == c_null_char) exit
            length = length + 1
        end do
        allocate (character(length) :: string)
        do at = 1, length
            string(at:at) = characters(at)
        end do
    end function

    ! A Fortran string as a text of C.
    pure function c_text(string) result(text)
        character(*), intent(in) :: string
        character(kind=c_char, len=:), allocatable :: text
        text = trim(string)//c_null_char
    end function

    ! The address of a text of C, which must exist as long as it is used; NULL without a string.
    subroutine set_text(component, text, string)
        type(c_ptr), intent(inout) :: component
        character(kind=c_char, len=:), allocatable, target, intent(inout) :: text
        character(*), intent(in), optional :: string
        if (.not. present(string)) return
        text = c_text(string)
        component = c_loc(text)
    end subroutine

    pure function flag(logical_value) result(number)
        logical, intent(in) :: logical_value
        integer(c_int32_t) :: number
        number = merge(1_c_int32_t, 0_c_int32_t, logical_value)
    end function

    ! Message, operation and name of the status of the thread's last error.
    function fabricast_message() result(string)
        character(:), allocatable :: string
        string = text_of(c_message())
    end function

    function fabricast_operation() result(string)
        character(:), allocatable :: string
        string = text_of(c_operation())
    end function

    function fabricast_status_name(status) result(string)
        integer(c_int32_t), intent(in) :: status
        character(:), allocatable :: string
        string = text_of(c_status_name(status))
    end function

    function fabricast_version() result(string)
        character(:), allocatable :: string
        string = text_of(c_version())
    end function

    ! ------------------------------------------------------------------------------ topics

    ! service_timeout is in nanoseconds.
    function fabricast_node_join(node, directory, label, service_timeout, waiting, listen, peers, &
                                 provider, insecure) result(status)
        type(fabricast_node), intent(out) :: node
        character(*), intent(in), optional :: directory, label, listen, peers, provider
        integer(c_int64_t), intent(in), optional :: service_timeout
        integer(c_int32_t), intent(in), optional :: waiting
        logical, intent(in), optional :: insecure
        integer(c_int32_t) :: status
        type(node_options) :: options
        character(kind=c_char, len=:), allocatable, target :: a, b, c, d, e

        status = c_node_options_init(options, c_sizeof(options))
        if (status /= FABRICAST_OK) return
        call set_text(options%directory, a, directory)
        call set_text(options%label, b, label)
        call set_text(options%listen, c, listen)
        call set_text(options%peers, d, peers)
        call set_text(options%provider, e, provider)
        if (present(service_timeout)) options%service_timeout = service_timeout
        if (present(waiting)) options%waiting = waiting
        if (present(insecure)) options%insecure = flag(insecure)
        status = c_node_join(options, node)
    end function

    ! Creates the topic if it does not exist and largest, its longest message in bytes, is present.
    ! release_deadline is in nanoseconds.
    function fabricast_topic_open(node, name, topic, largest, memory, depth, reliability, &
                                  release_deadline, type_name) result(status)
        type(fabricast_node), intent(in) :: node
        character(*), intent(in) :: name
        type(fabricast_topic), intent(out) :: topic
        integer(c_int64_t), intent(in), optional :: largest, release_deadline
        character(*), intent(in), optional :: memory, type_name
        integer(c_int32_t), intent(in), optional :: depth, reliability
        integer(c_int32_t) :: status
        type(topic_settings) :: settings
        character(kind=c_char, len=:), allocatable, target :: a, b

        if (.not. present(largest)) then
            status = c_topic_open(node, c_text(name), topic=topic)
            return
        end if
        status = c_topic_settings_init(settings, c_sizeof(settings))
        if (status /= FABRICAST_OK) return
        settings%largest = largest
        call set_text(settings%memory, a, memory)
        call set_text(settings%type_name, b, type_name)
        if (present(depth)) settings%depth = depth
        if (present(reliability)) settings%reliability = reliability
        if (present(release_deadline)) settings%release_deadline = release_deadline
        status = c_topic_open(node, c_text(name), settings, topic)
    end function

    ! ------------------------------------------------------------------------------ agents

    ! location is 'host', 'cuda:0', ...; the length is in bytes.
    function fabricast_memory_allocate(location, length, memory) result(status)
        character(*), intent(in) :: location
        integer(c_size_t), intent(in) :: length
        type(fabricast_memory), intent(out) :: memory
        integer(c_int32_t) :: status
        status = c_memory_allocate(c_text(location), length, memory)
    end function

    ! An array or scalar of any type, of the host or a device, of a length in bytes. It must be
    ! contiguous: others are refused, and not copied.
    function fabricast_memory_adopt(array, length, memory) result(status)
        type(*), dimension(..), intent(inout), target, asynchronous :: array
        integer(c_size_t), intent(in) :: length
        type(fabricast_memory), intent(out) :: memory
        integer(c_int32_t) :: status
        type(c_ptr) :: address

        address = c_null_ptr
        if (is_contiguous(array)) address = c_loc(array)
        status = c_memory_adopt(address, length, memory)
    end function

    ! lost_after is in nanoseconds.
    function fabricast_agent_start(agent, label, directory, fabric, source, rails, lost_after, &
                                   cached_bytes, cached_count, waiting, force_remote) result(status)
        type(fabricast_agent), intent(out) :: agent
        character(*), intent(in), optional :: label, directory, fabric, source
        integer(c_int32_t), intent(in), optional :: rails, cached_count, waiting
        integer(c_int64_t), intent(in), optional :: lost_after, cached_bytes
        logical, intent(in), optional :: force_remote
        integer(c_int32_t) :: status
        type(agent_options) :: options
        character(kind=c_char, len=:), allocatable, target :: a, b, c, d

        status = c_agent_options_init(options, c_sizeof(options))
        if (status /= FABRICAST_OK) return
        call set_text(options%label, a, label)
        call set_text(options%directory, b, directory)
        call set_text(options%fabric, c, fabric)
        call set_text(options%source, d, source)
        if (present(rails)) options%rails = rails
        if (present(lost_after)) options%lost_after = lost_after
        if (present(cached_bytes)) options%cached_bytes = cached_bytes
        if (present(cached_count)) options%cached_count = cached_count
        if (present(waiting)) options%waiting = waiting
        if (present(force_remote)) options%force_remote = flag(force_remote)
        status = c_agent_start(options, agent)
    end function

    ! The card in a new array; of length 0 after a failure.
    function fabricast_agent_card(agent, card) result(status)
        type(fabricast_agent), intent(in) :: agent
        integer(c_int8_t), allocatable, intent(out) :: card(:)
        integer(c_int32_t) :: status
        integer(c_size_t) :: length

        status = c_agent_card(agent, capacity=0_c_size_t, length=length)
        do
            if (allocated(card)) deallocate (card)
            allocate (card(length))
            if (status /= FABRICAST_OK .or. length == 0) return
            status = c_agent_card(agent, card, size(card, kind=c_size_t), length)
            if (status == FABRICAST_OK .and. length == size(card, kind=c_size_t)) return
            ! Another thread published a region meanwhile.
            if (status == FABRICAST_OK .or. status == FABRICAST_E_TOO_LONG) then
                status = c_agent_card(agent, capacity=0_c_size_t, length=length)
            end if
        end do
    end function

    function fabricast_card_info_of(card, info) result(status)
        integer(c_int8_t), contiguous, intent(in) :: card(:)
        type(fabricast_card_info), intent(out) :: info
        integer(c_int32_t) :: status
        status = c_card_info_of(card, size(card, kind=c_size_t), info, c_sizeof(info))
    end function

    ! The descriptor in a new array; of length 0 after a failure.
    function fabricast_region_descriptor(region, descriptor) result(status)
        type(fabricast_region), intent(in) :: region
        integer(c_int8_t), allocatable, intent(out) :: descriptor(:)
        integer(c_int32_t) :: status
        integer(c_size_t) :: length

        status = c_region_descriptor(region, capacity=0_c_size_t, length=length)
        allocate (descriptor(length))
        if (status == FABRICAST_OK) then
            status = c_region_descriptor(region, descriptor, &
                                         size(descriptor, kind=c_size_t), length)
        end if
    end function

    function fabricast_agent_publish(agent, name, region) result(status)
        type(fabricast_agent), intent(in) :: agent
        character(*), intent(in) :: name
        type(fabricast_region), intent(in) :: region
        integer(c_int32_t) :: status
        status = c_agent_publish(agent, c_text(name), region)
    end function

    function fabricast_agent_connect(agent, card, timeout, peer) result(status)
        type(fabricast_agent), intent(in) :: agent
        integer(c_int8_t), contiguous, intent(in) :: card(:)
        integer(c_int64_t), intent(in) :: timeout
        integer(c_int64_t), intent(out) :: peer
        integer(c_int32_t) :: status
        status = c_agent_connect(agent, card, size(card, kind=c_size_t), timeout, peer)
    end function

    function fabricast_agent_join(agent, peer, local, descriptor, timeout, route, policy) &
        result(status)
        type(fabricast_agent), intent(in) :: agent
        integer(c_int64_t), intent(in) :: peer
        type(fabricast_region), intent(in) :: local
        integer(c_int8_t), contiguous, intent(in) :: descriptor(:)
        integer(c_int64_t), intent(in) :: timeout
        type(fabricast_route), intent(out) :: route
        character(*), intent(in), optional :: policy
        integer(c_int32_t) :: status
        character(kind=c_char, len=:), allocatable :: text

        ! An empty policy accepts all paths.
        text = c_null_char
        if (present(policy)) text = c_text(policy)
        status = c_agent_join(agent, peer, local, descriptor, &
                              size(descriptor, kind=c_size_t), text, timeout, route)
    end function

    function fabricast_agent_route_to(agent, peer, name, local, timeout, route) result(status)
        type(fabricast_agent), intent(in) :: agent
        integer(c_int64_t), intent(in) :: peer
        character(*), intent(in) :: name
        type(fabricast_region), intent(in) :: local
        integer(c_int64_t), intent(in) :: timeout
        type(fabricast_route), intent(out) :: route
        integer(c_int32_t) :: status
        status = c_agent_route_to(agent, peer, c_text(name), local, timeout, route)
    end function

    function fabricast_agent_put(agent, route, blocks, notice, token) result(status)
        type(fabricast_agent), intent(in) :: agent
        type(fabricast_route), intent(in) :: route
        type(fabricast_block), contiguous, intent(in) :: blocks(:)
        type(fabricast_notice), intent(in), optional :: notice
        integer(c_int64_t), intent(out), optional :: token
        integer(c_int32_t) :: status
        status = c_agent_put(agent, route, blocks, size(blocks, kind=c_size_t), notice, token)
    end function

    function fabricast_agent_get(agent, route, blocks, notice, token) result(status)
        type(fabricast_agent), intent(in) :: agent
        type(fabricast_route), intent(in) :: route
        type(fabricast_block), contiguous, intent(in) :: blocks(:)
        type(fabricast_notice), intent(in), optional :: notice
        integer(c_int64_t), intent(out), optional :: token
        integer(c_int32_t) :: status
        status = c_agent_get(agent, route, blocks, size(blocks, kind=c_size_t), notice, token)
    end function

    function fabricast_agent_put_parts(agent, parts, notice, token) result(status)
        type(fabricast_agent), intent(in) :: agent
        type(fabricast_part), contiguous, intent(in) :: parts(:)
        type(fabricast_notice), intent(in), optional :: notice
        integer(c_int64_t), intent(out), optional :: token
        integer(c_int32_t) :: status
        status = c_agent_put_parts(agent, parts, size(parts, kind=c_size_t), notice, token)
    end function

    function fabricast_agent_get_parts(agent, parts, notice, token) result(status)
        type(fabricast_agent), intent(in) :: agent
        type(fabricast_part), contiguous, intent(in) :: parts(:)
        type(fabricast_notice), intent(in), optional :: notice
        integer(c_int64_t), intent(out), optional :: token
        integer(c_int32_t) :: status
        status = c_agent_get_parts(agent, parts, size(parts, kind=c_size_t), notice, token)
    end function

    function fabricast_agent_prepare_put(agent, route, blocks, prepared) result(status)
        type(fabricast_agent), intent(in) :: agent
        type(fabricast_route), intent(in) :: route
        type(fabricast_block), contiguous, intent(in) :: blocks(:)
        type(fabricast_prepared), intent(out) :: prepared
        integer(c_int32_t) :: status
        status = c_agent_prepare_put(agent, route, blocks, size(blocks, kind=c_size_t), prepared)
    end function

    function fabricast_agent_prepare_get(agent, route, blocks, prepared) result(status)
        type(fabricast_agent), intent(in) :: agent
        type(fabricast_route), intent(in) :: route
        type(fabricast_block), contiguous, intent(in) :: blocks(:)
        type(fabricast_prepared), intent(out) :: prepared
        integer(c_int32_t) :: status
        status = c_agent_prepare_get(agent, route, blocks, size(blocks, kind=c_size_t), prepared)
    end function

    function submit_all(agent, prepared, notice, token) result(status)
        type(fabricast_agent), intent(in) :: agent
        type(fabricast_prepared), intent(in) :: prepared
        type(fabricast_notice), intent(in), optional :: notice
        integer(c_int64_t), intent(out), optional :: token
        integer(c_int32_t) :: status
        ! FABRICAST_ALL.
        integer(c_size_t), parameter :: all_blocks = -1
        status = c_agent_submit(agent, prepared, count=all_blocks, notice=notice, token=token)
    end function

    ! An empty array has no block, and may have no address: it is not optional.
    function submit_selected(agent, prepared, indices, notice, token) result(status)
        type(fabricast_agent), intent(in) :: agent
        type(fabricast_prepared), intent(in) :: prepared
        integer(c_int32_t), contiguous, intent(in) :: indices(:)
        type(fabricast_notice), intent(in), optional :: notice
        integer(c_int64_t), intent(out), optional :: token
        integer(c_int32_t) :: status
        status = c_agent_submit(agent, prepared, indices, size(indices, kind=c_size_t), notice, &
                                token)
    end function

    function fabricast_route_path(route, path) result(status)
        type(fabricast_route), intent(in) :: route
        character(:), allocatable, intent(out) :: path
        integer(c_int32_t) :: status
        type(c_ptr) :: text
        status = c_route_path(route, text)
        path = text_of(text)
    end function

    function fabricast_route_fallback(route, reason) result(status)
        type(fabricast_route), intent(in) :: route
        character(:), allocatable, intent(out) :: reason
        integer(c_int32_t) :: status
        type(c_ptr) :: text
        status = c_route_fallback(route, text)
        reason = text_of(text)
    end function

    function fabricast_route_explain(route, explanation) result(status)
        type(fabricast_route), intent(in) :: route
        character(:), allocatable, intent(out) :: explanation
        integer(c_int32_t) :: status
        type(c_ptr) :: text
        status = c_route_explain(route, text)
        explanation = text_of(text)
    end function

    ! A tile of arrays in Fortran's order: of the size of tile, after so many elements of each
    ! dimension as origin says (0 at the start). element is in bytes: storage_size(array) / 8.
    function fabricast_strided_tile(rows, element, tile, from_extents, from_origin, to_extents, &
                                    to_origin) result(status)
        type(fabricast_strided), intent(out) :: rows
        integer(c_int64_t), intent(in) :: element
        integer(c_int64_t), intent(in) :: tile(:)
        integer(c_int64_t), intent(in) :: from_extents(size(tile)), from_origin(size(tile))
        integer(c_int64_t), intent(in) :: to_extents(size(tile)), to_origin(size(tile))
        integer(c_int32_t) :: status
        status = c_strided_tile(rows, c_sizeof(rows), ORDER_FORTRAN, element, &
                                size(tile, kind=c_size_t), tile, from_extents, from_origin, &
                                to_extents, to_origin)
    end function

    function fabricast_agent_next_event(agent, timeout, event) result(status)
        type(fabricast_agent), intent(in) :: agent
        integer(c_int64_t), intent(in) :: timeout
        type(fabricast_agent_event), intent(out) :: event
        integer(c_int32_t) :: status
        status = c_agent_next_event(agent, timeout, event, c_sizeof(event))
    end function
end module
