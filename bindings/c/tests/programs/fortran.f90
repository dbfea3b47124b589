! The module for Fortran: topics, and agents that put and get tiles of arrays, which are compared
! with assignments of array sections.
program test
    use, intrinsic :: iso_c_binding
    use fabricast
    implicit none

    integer(c_int64_t), parameter :: LONG = 60000000000_c_int64_t
    integer, parameter :: N = 24

    call texts()
    call topics()
    call agents()
    call adopted_arrays()
    if (fabricast_open_handles() /= 0) error stop 'handles are open'
    print '(a)', 'fortran: ok'

contains

    subroutine done(status)
        integer(c_int32_t), intent(in) :: status
        if (status /= FABRICAST_OK) then
            print '(a)', fabricast_message()
            error stop 1
        end if
    end subroutine

    subroutine expect(expected, status, says)
        integer(c_int32_t), intent(in) :: expected, status
        character(*), intent(in), optional :: says
        if (status /= expected) then
            print '(4a)', fabricast_status_name(status), ', not ', &
                fabricast_status_name(expected), ': '//fabricast_message()
            error stop 2
        end if
        if (present(says)) call check(index(fabricast_message(), says) > 0, fabricast_message())
    end subroutine

    subroutine check(is_right, what)
        logical, intent(in) :: is_right
        character(*), intent(in) :: what
        if (.not. is_right) then
            print '(2a)', 'failed: ', what
            error stop 3
        end if
    end subroutine

    subroutine texts()
        type(fabricast_agent) :: none
        type(fabricast_agent_event) :: event
        type(fabricast_card_info) :: info
        type(fabricast_strided) :: rows
        type(fabricast_notice) :: notice
        type(fabricast_block) :: block
        type(fabricast_part) :: part

        call check(fabricast_abi() == 0, 'abi')
        call check(index(fabricast_version(), '.') > 0, 'version')
        call check(fabricast_message() == '', 'no error')
        call check(fabricast_status_name(FABRICAST_E_CANCELLED) == 'cancelled', 'status')
        call expect(FABRICAST_E_BAD_HANDLE, fabricast_agent_progress(none), 'NULL')
        call check(fabricast_error_status() == FABRICAST_E_BAD_HANDLE, 'last error')
        call check(fabricast_operation() == 'make progress', 'operation')
        call fabricast_error_clear()
        call check(fabricast_error_status() == FABRICAST_OK, 'cleared')
        ! As in layout.c.
        call check(c_sizeof(event) == 4480, 'event')
        call check(c_sizeof(info) == 112, 'info')
        call check(c_sizeof(rows) == 104 .and. rows%size == 104, 'rows')
        call check(c_sizeof(notice) == 32 .and. notice%size == 32, 'notice')
        call check(c_sizeof(block) == 24, 'block')
        call check(c_sizeof(part) == 24, 'part')
        call check(fabricast_milliseconds(5) * 200 == fabricast_seconds(1), 'timeouts')
        call check(fabricast_text(['a', 'b', c_null_char, 'c']) == 'ab', 'text')
    end subroutine

    subroutine topics()
        type(fabricast_node) :: node
        type(fabricast_topic) :: topic, same
        type(fabricast_publisher) :: publisher
        type(fabricast_subscriber) :: subscriber
        type(fabricast_sample) :: sample
        real(c_double) :: sent(N, N), received(N, N)
        real(c_double), pointer :: in_place(:, :)
        type(c_ptr) :: address
        integer(c_size_t) :: length

        call random_number(sent)
        call done(fabricast_node_join(node, label='fortran ', service_timeout=LONG, &
                                      waiting=FABRICAST_WAITING_BLOCK))
        call expect(FABRICAST_E_NOT_FOUND, fabricast_topic_open(node, 'field', same))
        call done(fabricast_topic_open(node, 'field', topic, largest=8_c_int64_t*N*N, depth=4, &
                                       memory='host', type_name='field'))
        call done(fabricast_topic_open(node, 'field  ', same))
        call done(fabricast_topic_close(same))
        call expect(FABRICAST_E_SETTINGS_DIFFER, &
                    fabricast_topic_open(node, 'field', same, largest=8_c_int64_t, depth=4))
        call done(fabricast_subscriber_open(topic, subscriber))
        call done(fabricast_publisher_open(topic, publisher))
        call done(fabricast_publisher_wait_for_subscribers(publisher, 1_c_int64_t, FABRICAST_NOW))
        call expect(FABRICAST_E_WOULD_BLOCK, &
                    fabricast_subscriber_pull(subscriber, FABRICAST_NOW, sample))
        call done(fabricast_publisher_push(publisher, sent, c_sizeof(sent), LONG))
        call done(fabricast_subscriber_pull(subscriber, LONG, sample))
        call done(fabricast_sample_memory(sample, address, length))
        call check(length == c_sizeof(sent), 'length')
        call c_f_pointer(address, in_place, [N, N])
        call check(all(in_place == sent), 'in place')
        call done(fabricast_sample_read(sample, 0_c_size_t, received, c_sizeof(received)))
        call check(all(received == sent), 'read')
        call done(fabricast_sample_check(sample))
        call done(fabricast_sample_release(sample))
        ! A section is copied before.
        call done(fabricast_publisher_push(publisher, sent(2:5, 7), 4*8_c_size_t, LONG))
        call done(fabricast_subscriber_pull(subscriber, LONG, sample))
        call done(fabricast_sample_read(sample, 0_c_size_t, received, 32_c_size_t))
        call check(all(received(1:4, 1) == sent(2:5, 7)), 'section')
        call done(fabricast_sample_release(sample))
        call done(fabricast_publisher_flush(publisher, LONG))
        call done(fabricast_subscriber_close(subscriber))
        call done(fabricast_publisher_close(publisher))
        call done(fabricast_topic_close(topic))
        call done(fabricast_node_leave(node))
    end subroutine

    ! An array in memory that peers can map.
    subroutine allocate_field(memory, field)
        type(fabricast_memory), intent(out) :: memory
        real(c_double), pointer, intent(out) :: field(:, :, :)
        type(c_ptr) :: address
        integer(c_size_t) :: length

        call done(fabricast_memory_allocate('host', 8_c_size_t*N**3, memory))
        call done(fabricast_memory_address(memory, address, length))
        call check(length == 8*N**3, 'length of the field')
        call c_f_pointer(address, field, [N, N, N])
    end subroutine

    subroutine agents()
        type(fabricast_agent) :: west, east, none
        type(fabricast_memory) :: west_memory, east_memory
        type(fabricast_region) :: local, remote
        type(fabricast_route) :: route
        type(fabricast_agent_event) :: event
        type(fabricast_card_info) :: info
        type(fabricast_strided) :: halo
        real(c_double), pointer :: west_field(:, :, :), east_field(:, :, :)
        real(c_double), target :: cell
        real(c_double), allocatable :: expected(:, :, :)
        integer(c_int8_t), allocatable :: card(:), descriptor(:)
        character(:), allocatable :: text
        integer(c_int64_t) :: peer, token, number, bytes
        integer(c_int64_t), parameter :: whole(3) = N, column(3) = [1, N - 2, N - 2]
        integer(c_int64_t), parameter :: last(3) = [N - 2, 1, 1], first(3) = [0, 1, 1]

        call done(fabricast_agent_start(west, label='west', waiting=FABRICAST_WAITING_BLOCK))
        call done(fabricast_agent_start(east, label='east'))
        call expect(FABRICAST_E_NO_PROVIDER, fabricast_agent_start(none, fabric='=sokets'), &
                    'sokets')
        call check(.not. c_associated(none%handle), 'no agent')
        call allocate_field(west_memory, west_field)
        call allocate_field(east_memory, east_field)
        call done(fabricast_region_register(west, west_memory, FABRICAST_LOCAL_ONLY, local))
        call done(fabricast_region_register(east, east_memory, FABRICAST_READ + FABRICAST_WRITE, &
                                            remote))
        call expect(FABRICAST_E_DENIED, fabricast_region_descriptor(local, descriptor))
        call check(size(descriptor) == 0, 'no descriptor')
        call done(fabricast_region_descriptor(remote, descriptor))
        call done(fabricast_agent_publish(east, 'field', remote))
        call done(fabricast_agent_card(east, card))
        call done(fabricast_card_info_of(card, info))
        call check(fabricast_text(info%label) == 'east' .and. info%regions == 1, 'card')
        call done(fabricast_agent_connect(west, card, LONG, peer))
        call done(fabricast_agent_next_event(east, LONG, event))
        call check(event%kind == FABRICAST_AGENT_EVENT_JOINED, 'joined')
        call check(fabricast_text(event%label) == 'west', 'label')

        call expect(FABRICAST_E_NO_PATH, &
                    fabricast_agent_join(west, peer, local, descriptor, LONG, route, '=cuda-ipc'), &
                    'cuda-ipc: ')
        call done(fabricast_agent_join(west, peer, local, descriptor, LONG, route))
        call done(fabricast_route_close(route))
        call expect(FABRICAST_E_NOT_FOUND, &
                    fabricast_agent_route_to(west, peer, 'other', local, LONG, route))
        call done(fabricast_agent_route_to(west, peer, 'field', local, LONG, route))
        call done(fabricast_route_path(route, text))
        call check(text == 'same-process', text)
        call done(fabricast_route_fallback(route, text))
        call check(text == '', text)
        call done(fabricast_route_explain(route, text))
        call check(index(text, 'same-process') > 0, text)

        ! The last inner plane of west goes to the halo of east.
        call random_number(west_field)
        east_field = -1
        allocate (expected(N, N, N), source=-1.0_c_double)
        expected(1, 2:N - 1, 2:N - 1) = west_field(N - 1, 2:N - 1, 2:N - 1)
        call done(fabricast_strided_tile(halo, 8_c_int64_t, column, whole, last, whole, first))
        cell = 2.5_c_double
        call done(fabricast_agent_put_strided( &
                  west, route, halo, &
                  fabricast_notice(tag=7, data=c_loc(cell), length=c_sizeof(cell)), token))
        call done(fabricast_agent_wait(west, token, LONG, bytes))
        call check(bytes == 8*(N - 2)**2, 'bytes')
        call done(fabricast_agent_next_event(east, LONG, event))
        call check(event%kind == FABRICAST_AGENT_EVENT_NOTICE .and. event%tag == 7, 'notice')
        call check(transfer(event%data(1:event%length), cell) == cell, 'data of the notice')
        call check(all(east_field == expected), 'strided put')

        ! And back: a tile in the middle, to another place.
        call random_number(east_field)
        expected = west_field
        expected(3:6, 2:4, 9:15) = east_field(10:13, 5:7, 1:7)
        call done(fabricast_strided_tile( &
                  halo, 8_c_int64_t, [4_c_int64_t, 3_c_int64_t, 7_c_int64_t], whole, &
                  [9_c_int64_t, 4_c_int64_t, 0_c_int64_t], whole, &
                  [2_c_int64_t, 1_c_int64_t, 8_c_int64_t]))
        call done(fabricast_agent_get_strided(west, route, halo, token=token))
        number = 0
        do while (number == 0)
            call done(fabricast_agent_test(west, token, number))
        end do
        call check(all(west_field == expected), 'strided get')
        call expect(FABRICAST_E_INVALID_ARGUMENT, &
                    fabricast_strided_tile(halo, 8_c_int64_t, whole, whole, first, whole, &
                                           first*0), 'exceed')

        ! Blocks, whole regions, and order.
        call done(fabricast_agent_put(west, route, &
                                      [fabricast_block(8, 0, 16), fabricast_block(0, 16, 8)]))
        call done(fabricast_agent_flush(west, peer, LONG))
        call check(all(east_field(1:3, 1, 1) == west_field([3, 1, 2], 1, 1)), 'blocks')
        call expect(FABRICAST_E_INVALID_ARGUMENT, &
                    fabricast_agent_get(west, route, [fabricast_block(0, 0, 9*N**3)], token=token))
        call done(fabricast_agent_put_all(west, route))
        call done(fabricast_agent_fence(west, peer))
        call done(fabricast_agent_notify(west, peer, fabricast_notice(tag=1)))
        call done(fabricast_agent_notify_ordered(west, peer, fabricast_notice(tag=2), token))
        call done(fabricast_agent_wait(west, token, LONG))
        do number = 1, 2
            call done(fabricast_agent_next_event(east, LONG, event))
            call check(event%tag == number, 'order')
        end do
        call check(all(east_field == west_field), 'whole')
        call done(fabricast_agent_get_all(west, route, token=token))
        call done(fabricast_agent_forget(west, token))
        call done(fabricast_agent_flush(west, peer, LONG))
        call done(fabricast_agent_in_flight(west, number))
        call check(number == 0, 'in flight')
        call requests(west, route, west_field, east_field)
        call done(fabricast_agent_withdraw(east, remote, LONG))
        call expect(FABRICAST_E_STALE, fabricast_agent_get_all(west, route))
        call done(fabricast_agent_disconnect(west, peer, LONG))
        call done(fabricast_agent_close(west, LONG))
        call done(fabricast_agent_close(east, LONG))
        call done(fabricast_route_close(route))
        call done(fabricast_region_close(local))
        call done(fabricast_region_close(remote))
        call done(fabricast_memory_close(west_memory, LONG))
        call done(fabricast_memory_close(east_memory, LONG))
    end subroutine

    ! Planes of a field, prepared, and as parts of one request.
    subroutine requests(agent, route, here, there)
        type(fabricast_agent), intent(in) :: agent
        type(fabricast_route), intent(in) :: route
        real(c_double), pointer, intent(in) :: here(:, :, :), there(:, :, :)
        integer(c_int64_t), parameter :: PLANE = 8_c_int64_t*N*N
        type(fabricast_block), target :: planes(N)
        type(fabricast_prepared) :: put, get, none
        real(c_double), allocatable :: expected(:, :, :)
        integer(c_int64_t) :: token, bytes, is_cancelled
        integer :: at

        planes = [(fabricast_block((at - 1)*PLANE, (at - 1)*PLANE, PLANE), at=1, N)]
        call done(fabricast_agent_prepare_put(agent, route, planes, put))
        call done(fabricast_agent_prepare_get(agent, route, planes(:2), get))
        call done(fabricast_prepared_bytes(put, bytes))
        call check(bytes == N*PLANE, 'bytes of the planes')
        call random_number(here)
        call done(fabricast_agent_submit(agent, put, token=token))
        call done(fabricast_agent_wait(agent, token, LONG))
        call check(all(there == here), 'prepared')
        allocate (expected(N, N, N), source=there)
        call random_number(here)
        expected(:, :, [3, 8]) = here(:, :, [3, 8])
        call done(fabricast_agent_submit(agent, put, [2, 7], token=token))
        call done(fabricast_agent_wait(agent, token, LONG, bytes))
        call check(bytes == 2*PLANE .and. all(there == expected), 'by index')
        call done(fabricast_agent_submit(agent, get, [integer(c_int32_t) ::], token=token))
        call done(fabricast_agent_wait(agent, token, LONG, bytes))
        call check(bytes == 0, 'no plane')
        call done(fabricast_agent_submit(agent, get, token=token))
        call done(fabricast_agent_wait(agent, token, LONG))
        call check(all(here(:, :, :2) == there(:, :, :2)), 'prepared get')
        call expect(FABRICAST_E_INVALID_ARGUMENT, fabricast_agent_submit(agent, put, [N]), 'index 24')

        call random_number(here)
        expected(:, :, 5) = here(:, :, 5)
        expected(:, :, 9:10) = here(:, :, 9:10)
        call done(fabricast_agent_put_parts( &
                  agent, [fabricast_part(route, c_loc(planes(5)), 1), &
                          fabricast_part(route, c_loc(planes(9)), 2)], token=token))
        call done(fabricast_agent_wait(agent, token, LONG, bytes))
        call check(bytes == 3*PLANE .and. all(there == expected), 'parts')
        call done(fabricast_agent_get_parts( &
                  agent, [fabricast_part(route, c_loc(planes(1)), N)], token=token))
        call done(fabricast_agent_wait(agent, token, LONG))
        call check(all(here == there), 'parts of a get')
        call done(fabricast_agent_cancel(agent, token, is_cancelled))
        call check(is_cancelled == 0, 'over')
        call done(fabricast_prepared_close(put))
        call done(fabricast_prepared_close(get))
        call expect(FABRICAST_E_BAD_HANDLE, fabricast_agent_submit(agent, put), 'was closed')
        call done(fabricast_prepared_close(none))
    end subroutine

    ! Memory that the program has.
    subroutine adopted_arrays()
        real(c_double), allocatable, target, asynchronous :: here(:, :), there(:, :)
        type(fabricast_agent) :: agent
        type(fabricast_memory) :: memory, other
        type(fabricast_region) :: local, remote
        type(fabricast_route) :: route
        integer(c_int8_t), allocatable :: card(:)
        integer(c_int64_t) :: peer, token
        real(c_double) :: found(2)

        allocate (here(N, N), there(N, N))
        call random_number(here)
        there = 0
        call done(fabricast_agent_start(agent))
        call expect(FABRICAST_E_INVALID_ARGUMENT, &
                    fabricast_memory_adopt(here(1:N:2, :), 8_c_size_t*N, memory), 'NULL')
        call done(fabricast_memory_adopt(here, 8_c_size_t*size(here), memory))
        ! Whole columns are contiguous.
        call done(fabricast_memory_adopt(there(:, 3:4), 16_c_size_t*N, other))
        call done(fabricast_region_register(agent, memory, FABRICAST_LOCAL_ONLY, local))
        call done(fabricast_region_register(agent, other, FABRICAST_WRITE, remote))
        call done(fabricast_agent_publish(agent, 'columns', remote))
        call done(fabricast_agent_card(agent, card))
        call done(fabricast_agent_connect(agent, card, LONG, peer))
        call done(fabricast_agent_route_to(agent, peer, 'columns', local, LONG, route))
        call done(fabricast_agent_put(agent, route, &
                                      [fabricast_block(0, 8_c_int64_t*N*10, 16_c_int64_t*N)], &
                                      token=token))
        call done(fabricast_agent_wait(agent, token, LONG))
        call check(all(there(:, 3:4) == here(:, 11:12)), 'columns')
        call check(all(there(:, 5:) == 0) .and. all(there(:, :2) == 0), 'other columns')
        call done(fabricast_memory_write(memory, 8_c_size_t, [1.0_c_double, 2.0_c_double], &
                                         16_c_size_t))
        call check(all(here(2:3, 1) == [1, 2]), 'write')
        call done(fabricast_memory_read(memory, 8_c_size_t, found, 16_c_size_t))
        call check(all(found == [1, 2]), 'read')
        call expect(FABRICAST_E_WOULD_BLOCK, fabricast_memory_close(memory, FABRICAST_NOW))
        call done(fabricast_route_close(route))
        call done(fabricast_region_close(local))
        call done(fabricast_region_close(remote))
        call done(fabricast_memory_close(memory, LONG))
        call done(fabricast_memory_close(other, LONG))
        call done(fabricast_agent_close(agent, LONG))
    end subroutine
end program
