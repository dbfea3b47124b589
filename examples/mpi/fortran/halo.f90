! halo [ROWS COLUMNS [STEPS]] - halo exchange of a two-dimensional field by strided puts, beside the
! same exchange by MPI's derived types.
!
!     mpifort halo.f90 $(pkg-config --cflags --libs fabricast-fortran) -o halo
!     mpirun -n 4 ./halo 512 512
!
! MPI starts the ranks and sends the cards of their agents once. Then each rank puts the edges of its
! field into the halos of its neighbours, where they belong: nothing is packed, and no call of the
! neighbour is needed. The notice of a put arrives after its data.
!
! The field is kept twice, and a step computes one from the other. So a neighbour that is one step
! ahead writes the halo of the other field; it cannot be further ahead, because it needs this rank's
! notice for that.
program halo
    use, intrinsic :: iso_c_binding
    use, intrinsic :: iso_fortran_env, only: error_unit
    use mpi_f08
    use fabricast
    implicit none

    ! The sides of the field: the opposite of an odd one is the next, that of an even one the last.
    integer, parameter :: SIDES = 4
    integer, parameter :: OPPOSITE(SIDES) = [2, 1, 4, 3]
    integer, parameter :: CARD = 4096
    integer(c_int64_t), parameter :: BYTES = storage_size(0.0_c_double) / 8

    ! A side. Origins are elements before it, of the array with its halo.
    type side_type
        integer :: neighbour
        integer(c_int8_t) :: identity(16)  ! of its agent
        integer(c_int64_t), dimension(2) :: tile, edge, halo
        type(fabricast_route) :: route
        type(fabricast_strided) :: rows    ! the edge here, and the halo there
        type(MPI_Datatype) :: send, receive
    end type

    integer :: rank, ranks, rows, columns, steps, place(2), dimensions(2), side
    integer(c_int64_t) :: extents(2), timeout, arrived(0:1), mistakes, all
    integer(c_size_t) :: length
    type(side_type) :: sides_of(SIDES)
    type(MPI_Comm) :: grid
    type(fabricast_agent) :: agent
    type(fabricast_memory) :: memory
    type(fabricast_region) :: region
    type(c_ptr) :: address
    ! Peers write the halos at any time.
    real(c_double), pointer, contiguous, asynchronous :: fields(:, :, :)
    real(c_double), allocatable :: expected(:, :, :)
    real(c_double) :: seconds(2), slowest(2)

    call MPI_Init()
    call MPI_Comm_rank(MPI_COMM_WORLD, rank)
    call MPI_Comm_size(MPI_COMM_WORLD, ranks)
    call check_launcher('OMPI_COMM_WORLD_SIZE')
    call check_launcher('PMI_SIZE')
    timeout = fabricast_seconds(60)
    rows = argument(1, 256)
    columns = argument(2, 256)
    steps = argument(3, 100)
    dimensions = 0
    call MPI_Dims_create(ranks, 2, dimensions)
    call MPI_Cart_create(MPI_COMM_WORLD, 2, dimensions, [.false., .false.], .false., grid)
    call MPI_Cart_coords(grid, rank, 2, place)
    extents = [rows + 2, columns + 2]
    call describe_sides()

    call start_agent()
    call check(fabricast_memory_allocate('host', 2 * BYTES * product(extents), memory))
    call check(fabricast_memory_address(memory, address, length))
    call c_f_pointer(address, fields, [rows + 2, columns + 2, 2])
    call check(fabricast_region_register(agent, memory, FABRICAST_WRITE, region))
    call check(fabricast_agent_publish(agent, 'field', region))
    call connect_neighbours()

    mistakes = 0
    arrived = 0
    call run(by_mpi=.false., seconds=seconds(1))
    allocate (expected, source=fields)
    call run(by_mpi=.true., seconds=seconds(2))
    mistakes = mistakes + count(expected /= fields)

    call MPI_Reduce(seconds, slowest, 2, MPI_DOUBLE_PRECISION, MPI_MAX, 0, MPI_COMM_WORLD)
    call MPI_Allreduce(mistakes, all, 1, MPI_INTEGER8, MPI_SUM, MPI_COMM_WORLD)
    call check(fabricast_agent_close(agent, timeout))
    do side = 1, SIDES
        if (has_neighbour(side)) call check(fabricast_route_close(sides_of(side)%route))
        call MPI_Type_free(sides_of(side)%send)
        call MPI_Type_free(sides_of(side)%receive)
    end do
    call check(fabricast_region_close(region))
    call check(fabricast_memory_close(memory, timeout))
    if (rank == 0) then
        print '(a, f0.1, a, f0.1, a)', 'halo (Fortran): exchange by puts ', 1e6 * slowest(1), &
            ' us, by MPI ', 1e6 * slowest(2), ' us'
        print '(4(a, i0), 2a)', 'halo (Fortran): ', rows, ' x ', columns, ' cells on each of ', &
            ranks, ' ranks, ', steps, ' steps: ', trim(merge('ok         ', 'wrong cells', all == 0))
    end if
    call MPI_Comm_free(grid)
    call MPI_Finalize()
    if (all /= 0) error stop 1

contains

    subroutine check(status)
        integer(c_int32_t), intent(in) :: status
        if (status == FABRICAST_OK) return
        write (error_unit, '(a, i0, 2a)') 'rank ', rank, ': ', fabricast_message()
        call MPI_Abort(MPI_COMM_WORLD, 1)
    end subroutine

    ! MPI that this program was not built for starts each rank as a job of one.
    subroutine check_launcher(variable)
        character(*), intent(in) :: variable
        character(16) :: text
        integer :: started, error

        call get_environment_variable(variable, text, status=error)
        if (error /= 0) return
        read (text, *, iostat=error) started
        if (error /= 0 .or. ranks > 1 .or. started <= 1) return
        write (error_unit, '(5a)') 'start ranks failed: MPI has 1 rank, but ', variable, ' is ', trim(text), &
            '. Start the program with the mpirun of the MPI that it was built for'
        call MPI_Abort(MPI_COMM_WORLD, 1)
    end subroutine

    ! An argument of the command line.
    function argument(number, default) result(value)
        integer, intent(in) :: number, default
        integer :: value, error
        character(32) :: text

        value = default
        if (command_argument_count() < number) return
        call get_command_argument(number, text)
        read (text, *, iostat=error) value
        if (error /= 0 .or. value < 1) value = default
    end function

    logical function has_neighbour(side)
        integer, intent(in) :: side
        has_neighbour = sides_of(side)%neighbour /= MPI_PROC_NULL
    end function

    ! The neighbours, and what goes to and comes from them.
    subroutine describe_sides()
        integer :: across
        integer(c_int64_t) :: inner

        call MPI_Cart_shift(grid, 0, 1, sides_of(1)%neighbour, sides_of(2)%neighbour)
        call MPI_Cart_shift(grid, 1, 1, sides_of(3)%neighbour, sides_of(4)%neighbour)
        do side = 1, SIDES
            associate (it => sides_of(side))
                across = (side + 1) / 2
                inner = extents(across) - 2
                it%tile = extents - 2
                it%tile(across) = 1
                it%edge = 1
                it%halo = 1
                it%edge(across) = merge(1_c_int64_t, inner, mod(side, 2) == 1)
                it%halo(across) = merge(0_c_int64_t, inner + 1, mod(side, 2) == 1)
                it%send = type_of(it%tile, it%edge)
                it%receive = type_of(it%tile, it%halo)
            end associate
        end do
    end subroutine

    function type_of(tile, origin) result(type)
        integer(c_int64_t), intent(in) :: tile(2), origin(2)
        type(MPI_Datatype) :: type
        call MPI_Type_create_subarray(2, int(extents), int(tile), int(origin), MPI_ORDER_FORTRAN, &
                                      MPI_DOUBLE_PRECISION, type)
        call MPI_Type_commit(type)
    end function

    ! Starts the agent, with a socket in a directory that all ranks of this machine see.
    subroutine start_agent()
        character(4096) :: directory, variable
        character(:), allocatable :: provider, source
        character(32) :: label
        integer :: here, error
        type(MPI_Comm) :: machine

        call get_environment_variable('FABRICAST_DIRECTORY', directory, status=error)
        if (error /= 0) then
            call get_environment_variable('USER', label)
            directory = '/tmp/fabricast-'//label
        end if
        call execute_command_line('mkdir -p -m 700 '//trim(directory))
        call MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, machine)
        call MPI_Comm_size(machine, here)
        call MPI_Comm_free(machine)
        write (label, '(a, i0)') 'halo ', rank
        if (here == ranks) then
            call check(fabricast_agent_start(agent, label=label, directory=directory))
        else
            provider = 'auto'
            call get_environment_variable('FABRICAST_PROVIDER', variable)
            ! All ranks need the same provider: one that is named is required.
            if (variable /= '') provider = trim(variable)
            if (provider /= 'auto' .and. scan(provider(1:1), '=^') == 0) provider = '='//provider
            ! Without a value it counts as absent.
            call get_environment_variable('FABRICAST_SOURCE', variable)
            if (variable /= '') source = trim(variable)
            call check(fabricast_agent_start(agent, label=label, directory=directory, &
                                             fabric=provider, source=source))
        end if
    end subroutine

    ! Exchanges the cards of all ranks, and makes routes to the neighbours.
    subroutine connect_neighbours()
        integer(c_int8_t), allocatable :: own(:), cards(:, :)
        integer(c_int8_t) :: padded(CARD)
        integer, allocatable :: lengths(:)
        integer(c_int64_t) :: peer
        type(fabricast_card_info) :: info

        call check(fabricast_agent_card(agent, own))
        if (size(own) > CARD) then
            write (error_unit, '(a, i0, a)') 'exchange cards failed: ', size(own), ' bytes are too long'
            call MPI_Abort(MPI_COMM_WORLD, 1)
        end if
        padded = 0
        padded(:size(own)) = own
        allocate (cards(CARD, 0:ranks - 1), lengths(0:ranks - 1))
        call MPI_Allgather(size(own), 1, MPI_INTEGER, lengths, 1, MPI_INTEGER, MPI_COMM_WORLD)
        call MPI_Allgather(padded, CARD, MPI_BYTE, cards, CARD, MPI_BYTE, MPI_COMM_WORLD)
        do side = 1, SIDES
            if (.not. has_neighbour(side)) cycle
            associate (it => sides_of(side))
                call check(fabricast_agent_connect( &
                           agent, cards(:lengths(it%neighbour), it%neighbour), timeout, peer))
                call check(fabricast_card_info_of(cards(:lengths(it%neighbour), it%neighbour), info))
                it%identity = info%identity
                call check(fabricast_agent_route_to(agent, peer, 'field', region, timeout, it%route))
                call check(fabricast_strided_tile(it%rows, BYTES, it%tile, extents, it%edge, &
                                                  extents, sides_of(OPPOSITE(side))%halo))
            end associate
        end do
    end subroutine

    subroutine exchange_by_puts(step)
        integer, intent(in) :: step
        type(fabricast_strided) :: put
        type(fabricast_agent_event) :: event
        integer(c_int64_t) :: tokens(SIDES), offset
        integer :: neighbours, even, number

        even = mod(step, 2)
        offset = even * BYTES * product(extents)
        neighbours = 0
        do side = 1, SIDES
            if (.not. has_neighbour(side)) cycle
            put = sides_of(side)%rows
            put%from = put%from + offset
            put%to = put%to + offset
            neighbours = neighbours + 1
            call check(fabricast_agent_put_strided( &
                       agent, sides_of(side)%route, put, &
                       fabricast_notice(tag=int(step, c_int64_t)), tokens(neighbours)))
        end do
        do number = 1, neighbours
            call check(fabricast_agent_wait(agent, tokens(number), timeout))
        end do
        do while (arrived(even) < neighbours)
            call check(fabricast_agent_next_event(agent, timeout, event))
            if (event%kind == FABRICAST_AGENT_EVENT_LEFT) call check_neighbour(event)
            if (event%kind /= FABRICAST_AGENT_EVENT_NOTICE) cycle
            arrived(mod(event%tag, 2_c_int64_t)) = arrived(mod(event%tag, 2_c_int64_t)) + 1
        end do
        arrived(even) = 0
    end subroutine

    ! A neighbour that ended sends nothing more. Other agents, such as that of
    ! `fabricast paths --explain`, may come and go.
    subroutine check_neighbour(event)
        type(fabricast_agent_event), intent(in) :: event

        do side = 1, SIDES
            if (.not. has_neighbour(side)) cycle
            if (any(sides_of(side)%identity /= event%from)) cycle
            write (error_unit, '(2(a, i0), a)') 'rank ', rank, ': wait for rank ', &
                sides_of(side)%neighbour, ' failed: it has left'
            call MPI_Abort(MPI_COMM_WORLD, 1)
        end do
    end subroutine

    subroutine exchange_by_mpi(field)
        real(c_double), contiguous, asynchronous, intent(inout) :: field(:, :)
        type(MPI_Request) :: requests(2 * SIDES)

        do side = 1, SIDES
            call MPI_Irecv(field, 1, sides_of(side)%receive, sides_of(side)%neighbour, side, &
                           MPI_COMM_WORLD, requests(side))
        end do
        do side = 1, SIDES
            call MPI_Isend(field, 1, sides_of(side)%send, sides_of(side)%neighbour, &
                           OPPOSITE(side), MPI_COMM_WORLD, requests(SIDES + side))
        end do
        call MPI_Waitall(size(requests), requests, MPI_STATUSES_IGNORE)
    end subroutine

    ! A cell of the whole field before the first step; row and column are those of this rank.
    elemental function value(row, column) result(cell)
        integer, intent(in) :: row, column
        real(c_double) :: cell
        cell = 1 + mod((place(1) * rows + row) * 37 + (place(2) * columns + column) * 11, 101)
    end function

    ! Computes all steps from the beginning, and measures an exchange.
    subroutine run(by_mpi, seconds)
        logical, intent(in) :: by_mpi
        real(c_double), intent(out) :: seconds
        integer :: step, from, to, row, column
        real(c_double) :: start

        fields = 0
        do concurrent(row=1:rows, column=1:columns)
            fields(row + 1, column + 1, 1) = value(row, column)
        end do
        call MPI_Barrier(MPI_COMM_WORLD)
        seconds = 0
        do step = 0, steps - 1
            from = 1 + mod(step, 2)
            to = 3 - from
            start = MPI_Wtime()
            if (by_mpi) call exchange_by_mpi(fields(:, :, from))
            if (.not. by_mpi) call exchange_by_puts(step)
            seconds = seconds + (MPI_Wtime() - start) / steps
            if (step == 0) call check_halos()
            ! Not the halo that comes next: neighbours may write it now.
            call relax(fields(:, :, from), fields(2:rows + 1, 2:columns + 1, to))
        end do
    end subroutine

    ! Each cell becomes the mean of its neighbours.
    subroutine relax(old, new)
        real(c_double), intent(in) :: old(0:, 0:)
        real(c_double), intent(out) :: new(:, :)
        new = 0.25_c_double * (old(:rows - 1, 1:columns) + old(2:, 1:columns) &
                               + old(1:rows, :columns - 1) + old(1:rows, 2:))
    end subroutine

    ! After the first exchange.
    subroutine check_halos()
        integer :: row, column, first(2), last(2)

        do side = 1, SIDES
            if (.not. has_neighbour(side)) cycle
            first = int(sides_of(side)%halo)
            last = first + int(sides_of(side)%tile) - 1
            mistakes = mistakes + count([((fields(row + 1, column + 1, 1) /= value(row, column), &
                                           row=first(1), last(1)), column=first(2), last(2))])
        end do
    end subroutine
end program
